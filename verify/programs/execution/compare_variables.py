"""Observed variables of a program, put together and compared with logical tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod

import torch
from torch import Tensor

from nnscaler.layout import MICRO, Partial, State, gradient_state, parse_state
from nnscaler.manifest import Manifest
from nnscaler.runtime.shards import Assembled, assemble, ravel, shard, unravel
from nnscaler.runtime.stage_base_class import Stage, place_in_time, sizes_in_time
from nnscaler.runtime.tensor_bits_and_differences import FAMILY_SHARE, difference, largest_up_to
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import WrongTensor, laid_out

Pieces = dict[tuple[int, int], Tensor]  # (rank, micro-batch) -> what was seen
Observed = dict[tuple[int, str, str], Pieces]  # (stage, phase, variable)
_ENTRY = re.compile(r"(\w+): (\w+(?:\((?:[^()]|\([^()]*\))*\))?)")


@dataclass(frozen=True)
class Variable:
    """A variable of a stage: the logical tensor that it is, and how it lies on the axes and on micro-batches."""

    name: str
    tensor: str
    layout: str
    states: Mapping[str, State]
    stage: type[Stage]


@dataclass(frozen=True, slots=True)
class VariableDifference:
    """How a variable differs, on which ranks (those of the worst micro-batch), empty where no rank can be blamed.

    `known`: why, where that is seen at once; `evidence`: what else tells why.
    """

    text: str
    ranks: tuple[int, ...] = ()
    micro: int | None = None
    known: str | None = None
    evidence: Callable[[], WrongTensor | None] = lambda: None

    @property
    def cause(self) -> str | None:
        """Why it differs, where more is known than where it does."""
        return self.known or cause_of(self.evidence()).told


def facts_of(shown: str, variable: Variable, unequal: VariableDifference) -> dict[str, str]:
    """Return the facts of a finding on a variable that differs, which is `shown` by this name."""
    facts = {"variable": shown, "stage": str(variable.stage.index)}
    if unequal.ranks:
        facts["ranks"] = ", ".join(map(str, unequal.ranks))
    if unequal.micro is not None:
        facts["micro-batch"] = str(unequal.micro)
    return {**facts, "layout": variable.layout or "whole and equal on every rank", "difference": unequal.text}


def variables_of(manifest: Manifest, stages: Mapping[int, type[Stage]]) -> dict[tuple[int, str], Variable]:
    """Return (stage, variable) -> the manifest's entry for it."""
    found: dict[tuple[int, str], Variable] = {}
    for index, variables in manifest.tensors.items():
        stage = stages.get(index)
        if stage is None:
            continue
        for name, (tensor, layout) in variables.items():
            found[index, name] = Variable(name, tensor, layout, parse_layout(layout), stage)
    return found


def parse_layout(text: str) -> dict[str, State]:
    """Parse a layout into states: the inverse of `format_layout`."""
    return {axis: parse_state(state) for axis, state in _ENTRY.findall(text)}


def gradient_states(states: Mapping[str, State]) -> dict[str, State]:
    """Return how the gradient of a tensor with these states lies, read as a value."""
    return {axis: gradient_state(state) for axis, state in states.items()}


def compare_variable(
    variable: Variable, pieces: Pieces, expected: Tensor, bound: float, *, is_gradient: bool, scale: float = 0.0
) -> VariableDifference | None:
    """Return how the variable (or its gradient) differs from the logical tensor; None if it agrees."""
    states = gradient_states(variable.states) if is_gradient else dict(variable.states)
    prepared = all(micro < 0 for _, micro in pieces)
    sizes = dict(variable.stage.axes)
    if not prepared:
        sizes |= sizes_in_time(variable.stage)
    states = {axis: state for axis, state in states.items() if axis in sizes}
    if len(pieces) != prod(sizes.values()):
        return None  # the run ended before every rank had it
    at = {place: (_coordinates(variable, *place, prepared), piece) for place, piece in sorted(pieces.items())}
    evidence = partial(laid_out, "gradient" if is_gradient else "value", at, expected, states, sizes)
    blamed = _blame(variable, pieces, expected, bound, states, sizes, scale)
    if blamed is not None:
        return replace(blamed, evidence=evidence)
    exact = [(here, piece.to(torch.complex128 if piece.is_complex() else torch.float64)) for here, piece in at.values()]
    try:
        assembled = assemble(exact, states, sizes, tuple(expected.shape))
    except ValueError as error:
        return VariableDifference(str(error))
    found = difference(assembled.value, expected, scale)
    if found.relative <= bound:
        return _unequal_copies(variable, assembled, expected, bound, scale)
    return VariableDifference(str(found), evidence=evidence)


def _unequal_copies(
    variable: Variable, assembled: Assembled, expected: Tensor, bound: float, scale: float
) -> VariableDifference | None:
    """Find partial sums whose copies on another axis differ: the first copy alone is right."""
    allowed = bound * max(largest_up_to(expected), FAMILY_SHARE * scale)
    unequal = [found for found in assembled.differences if found.largest > allowed]
    if not unequal:
        return None
    at = dict(unequal[0].other)
    axes = ", ".join(axis for axis, index in unequal[0].coordinates if at[axis] != index)
    rank = variable.stage.ranks[ravel(at, variable.stage.axes)]
    return VariableDifference(
        str(unequal[0]), (rank,), known=f"only the first rank of {axes} is right, and its copies differ"
    )


def _blame(
    variable: Variable,
    pieces: Pieces,
    expected: Tensor,
    bound: float,
    states: Mapping[str, State],
    sizes: Mapping[str, int],
    scale: float,
) -> VariableDifference | None:
    """Return the ranks whose piece is not what the layout says; partial sums blame nobody."""
    if any(isinstance(state, Partial) for state in states.values()):
        return None
    wrong: dict[int, list[int]] = {}
    worst, text = 0.0, ""
    for (rank, micro), piece in sorted(pieces.items()):
        coordinates = _coordinates(variable, rank, micro, micro < 0)
        try:
            right = shard(expected if expected.is_complex() else expected.double(), states, sizes, coordinates)
        except ValueError as error:
            return VariableDifference(str(error), (rank,))
        found = difference(piece, right, scale)
        if found.relative > bound:
            wrong.setdefault(micro, []).append(rank)
            if found.relative > worst or found.relative == inf:
                worst, text = found.relative, f"{found} on rank {rank}"
    if not wrong:
        return None
    number = min(wrong)
    micro = place_in_time(variable.stage, max(number, 0))[MICRO]
    return VariableDifference(
        text, tuple(wrong[number]), micro if number >= 0 and variable.stage.micro_batches > 1 else None
    )


def _coordinates(variable: Variable, rank: int, micro: int, prepared: bool) -> dict[str, int]:
    coordinates = unravel(variable.stage.ranks.index(rank), variable.stage.axes)
    return coordinates if prepared else {**coordinates, **place_in_time(variable.stage, micro)}
