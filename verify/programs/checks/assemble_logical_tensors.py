"""Logical tensors put together from what the ranks hold, by the layouts that the role programs or the ranks declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nnscaler.layout import IN_STEP, Replicated, States
from nnscaler.runtime.shards import assemble, logical_coordinates, ravel, unravel
from nnscaler.runtime.stage_base_class import Buffer, Parameter, Stage
from nnscaler.runtime.tensor_bits_and_differences import (
    FAMILY_SHARE,
    FILL,
    TensorDifference,
    difference,
    distance_of_copies,
    family_scale,
    same_bits,
)
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


# Tensors of which each rank says where its shard lies: each element has its owners, and all of them the same bits.

Region = tuple[Any, ...]  # where a piece lies in the logical tensor: slices where it is a block, else indices


@dataclass(frozen=True)
class Layout:
    """Where a rank's shard of a parameter or buffer lies, between steps. `names`: all that it has in the model."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    states: States
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]


@dataclass(frozen=True)
class JoinedTensor:
    """A logical tensor as the ranks hold it.

    value    None where no rank has it, or its pieces do not make it up
    pieces   rank -> local tensor
    regions  rank -> where that lies
    unequal  copies with other bits
    copies   how many were compared
    problem  why the pieces do not make it up
    """

    value: Tensor | None
    pieces: Mapping[int, Tensor] = field(default_factory=dict)
    regions: Mapping[int, Region] = field(default_factory=dict)
    unequal: tuple[UnequalElements, ...] = ()
    copies: int = 0
    problem: str = ""

    def apart(self, expected: Tensor, scale: float) -> dict[int, TensorDifference]:
        """Return how far each rank's piece is from that of the right tensor, relative to all of it: a shard may be
        small. `scale`: that of the family of tensors."""
        whole = max(scale, family_scale([expected], FILL) / FAMILY_SHARE)
        return {rank: difference(piece, expected[self.regions[rank]], whole) for rank, piece in self.pieces.items()}


def indices_of(layout: Layout) -> tuple[Tensor, ...]:
    """Return the indices of a rank's shard in the logical tensor."""
    held = logical_coordinates(layout.shape, layout.states, layout.sizes, layout.coordinates)
    return tuple(torch.meshgrid(*held, indexing="ij")) if held else ()


def region_of(layout: Layout) -> Region:
    """Return the same as slices, where the shard is a block."""
    held = logical_coordinates(layout.shape, layout.states, layout.sizes, layout.coordinates)
    if all(not len(i) or int(i[-1]) - int(i[0]) == len(i) - 1 for i in held):
        return tuple(slice(int(i[0]), int(i[-1]) + 1) if len(i) else slice(0, 0) for i in held)
    return indices_of(layout)


def join(layouts: Mapping[int, Layout], found: Mapping[int, Tensor | None]) -> JoinedTensor:
    """Return the logical tensor that ranks hold in these layouts. `found`: what each has, by rank."""
    pieces = {rank: piece for rank in layouts if (piece := found.get(rank)) is not None}
    if not pieces:
        return JoinedTensor(None)
    absent = [rank for rank in layouts if rank not in pieces]
    if absent:
        problem = f"rank {absent[0]} has none, rank {next(iter(pieces))} has one"
        return JoinedTensor(None, pieces, problem=problem)
    regions = {rank: region_of(layouts[rank]) for rank in pieces}
    shape = next(iter(layouts.values())).shape
    value = next(iter(pieces.values())).new_zeros(shape)
    owner = torch.full(shape, -1)
    differing: list[UnequalElements] = []
    copies = 0
    for rank, piece in pieces.items():
        region = regions[rank]
        wanted = tuple(owner[region].shape)
        if tuple(piece.shape) != wanted:
            problem = f"rank {rank} has {tuple(piece.shape)} of it, and its shard is {wanted}"
            return JoinedTensor(None, pieces, regions, problem=problem)
        known = owner[region]
        if not piece.numel():
            continue
        if bool((known < 0).all()):
            value[region], owner[region] = piece, rank
        elif bool((known < 0).any()):
            problem = f"rank {rank} has elements that rank {int(known.max())} has as well, and others that none has"
            return JoinedTensor(None, pieces, regions, problem=problem)
        else:
            copies += 1
            differing += unequal(value[region], piece, int(known.flatten()[0]), rank)
    missing = int((owner < 0).sum())
    if missing:
        return JoinedTensor(None, pieces, regions, problem=f"no rank has {missing} of its {owner.numel()} elements")
    return JoinedTensor(value, pieces, regions, tuple(differing), copies)


def unequal(one: Tensor, other: Tensor, first: int, rank: int) -> list[UnequalElements]:
    """Return how two copies differ, bitwise: NaN equals itself, and -0.0 is not 0.0."""
    if same_bits(one, other):
        return []
    return [UnequalElements(first, rank, *distance_of_copies(one, other))]
