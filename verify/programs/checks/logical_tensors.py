"""Logical tensors put together from what the ranks hold, by the layouts that the role programs declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType

from torch import Tensor

from nnscaler.layout import IN_STEP, Replicated, States
from nnscaler.runtime.shards import assemble, ravel, unravel
from nnscaler.runtime.stage_base_class import Buffer, Parameter, Stage
from nnscaler.runtime.tensor_bits import same_bits
from verify.programs.execution.record_rank_steps import Entry, RankResult


@dataclass(frozen=True)
class Holding:
    """A stored tensor of one stage."""

    name: str
    stage: int
    attribute: str
    shape: tuple[int, ...]
    states: States
    axes: Mapping[str, int]
    ranks: tuple[int, ...]
    trainable: bool
    reduce: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnequalElements:
    """Two ranks with different bits of the same elements."""

    first: int
    other: int
    elements: int
    largest: float


@dataclass(frozen=True)
class StageTensor:
    """A logical tensor as one stage holds it.

    value    assembled from the pieces, `[*global shape]`; None if no rank has it
    unequal  copies that differ
    copies   number of copies that were compared bitwise
    problem  why the pieces could not be assembled; else empty
    pieces   rank -> local tensor
    """

    holding: Holding
    value: Tensor | None
    unequal: tuple[UnequalElements, ...] = ()
    copies: int = 0  # how many were compared bitwise
    problem: str = ""
    pieces: Mapping[int, Tensor] | None = None  # by rank


def holdings_of(modules: Iterable[ModuleType]) -> tuple[dict[tuple[int, str], Holding], dict[tuple[int, str], Holding]]:
    """Return (parameters, buffers) that the stages of these role modules declare, by stage and attribute."""
    parameters: dict[tuple[int, str], Holding] = {}
    buffers: dict[tuple[int, str], Holding] = {}
    for module in modules:
        for stage in module.STAGES:
            for trainable, declared in ((True, stage.parameters), (False, stage.frozen)):
                for attribute, parameter in declared.items():
                    parameters[stage.index, attribute] = _holding(stage, attribute, parameter, trainable)
            for attribute, buffer in stage.buffers.items():
                buffers[stage.index, attribute] = _holding(stage, attribute, buffer, False)
    return parameters, buffers


def _holding(stage: type[Stage], attribute: str, declared: Parameter | Buffer, trainable: bool) -> Holding:
    reduce = declared.summed if isinstance(declared, Parameter) else ()
    return Holding(
        declared.fqn,
        stage.index,
        attribute,
        tuple(declared.shape),
        {axis: state for axis, state in declared.at_rest.items() if not isinstance(state, Replicated)},
        dict(stage.axes),
        tuple(stage.ranks),
        trainable,
        tuple(reduce),
    )


def results_of(modules: Iterable[ModuleType]) -> dict[str, Holding]:
    """Return the results that the stages of these role modules declare, by name, as they lie over ranks."""
    return {
        name: Holding(
            name,
            stage.index,
            name,
            tuple(declared.shape),
            {a: s for a, s in declared.states.items() if a not in IN_STEP and not isinstance(s, Replicated)},
            dict(stage.axes),
            tuple(stage.ranks),
            False,
        )
        for module in modules
        for stage in module.STAGES
        for name, declared in stage.results.items()
    }


def put_together(holding: Holding, entries: Mapping[int, Sequence[Entry]]) -> StageTensor:
    """Return the logical tensor from the entries of every rank (by rank)."""
    pieces: dict[int, Tensor] = {}
    absent: list[int] = []
    for rank in holding.ranks:
        piece = _find(entries.get(rank, ()), holding)
        if piece is None:
            absent.append(rank)
        else:
            pieces[rank] = piece
    if not pieces:
        return StageTensor(holding, None)
    if absent:
        problem = f"rank {absent[0]} has none, rank {next(iter(pieces))} has one"
        return StageTensor(holding, None, problem=problem, pieces=pieces)
    at = [(unravel(position, holding.axes), pieces[rank]) for position, rank in enumerate(holding.ranks)]
    try:
        assembled = assemble(at, holding.states, holding.axes, holding.shape)
    except ValueError as error:
        return StageTensor(holding, None, problem=str(error), pieces=pieces)
    unequal = tuple(
        UnequalElements(
            holding.ranks[ravel(dict(found.coordinates), holding.axes)],
            holding.ranks[ravel(dict(found.other), holding.axes)],
            found.elements,
            found.largest,
        )
        for found in assembled.differences
    )
    shards = prod(holding.axes.get(axis, 1) for axis in holding.states)
    return StageTensor(holding, assembled.value, unequal, len(pieces) - shards, pieces=pieces)


def _find(entries: Sequence[Entry], holding: Holding) -> Tensor | None:
    for stage, attribute, _, tensor in entries:
        if stage == holding.stage and attribute == holding.attribute:
            return tensor
    return None


def by_rank(results: Iterable[RankResult], kind: str, step: int = 0) -> dict[int, Sequence[Entry]]:
    """Return the entries of "gradient" or "result" (of a step), "parameter" or "buffer" by rank."""
    found: dict[int, Sequence[Entry]] = {}
    for result in results:
        if kind == "gradient":
            found[result.rank] = result.gradients[step]
        elif kind == "result":
            found[result.rank] = result.returned[step]
        else:
            found[result.rank] = result.parameters if kind == "parameter" else result.buffers
    return found


def tied_copies_differ(one: StageTensor, other: StageTensor) -> bool:
    """Return whether two stages hold different bits of a tensor that they should share."""
    if one.value is None or other.value is None:
        return (one.value is None) != (other.value is None)
    return not same_bits(one.value, other.value)
