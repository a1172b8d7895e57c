"""Facts of a rank's tensor: which logical tensor it has, how much of it, and how that lies on each mesh axis.

A fact is a true statement about one tensor of a rank's graph, for all values of parameters and inputs and on all
ranks. A tensor may have several: what two ranks each have whole is also, halved, a term of a sum. Here is what
changes of layout make of facts: slices, collectives, and the pieces that DTensor cuts and joins around a collective
along dim 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from nnscaler.layout import Axis
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, Constant, PartialSum, Same, Shard, State, Zero
from verify.external.proof.result_states_of_rank_call import States


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """A tensor cut into `parts` equal pieces along `dim`: one of them, or (`index` None) all stacked along dim 0."""

    dim: int
    parts: int
    index: int | None


@dataclass(frozen=True, slots=True)
class Fact:
    """
    coefficient  of the logical tensor
    term         the logical tensor
    states       how it lies, one per axis
    pieces       the tensor is not that, but made of pieces of it; None: it is that
    ignored      labels that do not count: it relies on as many of others in each data part
    """

    coefficient: Fraction
    term: int
    states: States
    pieces: TensorPieces | None = None
    ignored: frozenset[int] = frozenset()

    def at(self, axis: int, state: State) -> Fact:
        """Return the fact with another state on one axis."""
        return replace(self, states=(*self.states[:axis], state, *self.states[axis + 1 :]))

    def times(self, factor: Fraction) -> Fact:
        """Return the fact of a multiple."""
        return replace(self, coefficient=self.coefficient * factor)


class NoFact(Exception):
    """Nothing follows; the message says why. `axis`: over which; `partial`: terms of a sum are used as the whole."""

    def __init__(self, reason: str, axis: str = "", partial: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.axis, self.partial = reason, axis, partial


def as_terms(fact: Fact, axis: int, parts: int) -> Fact:
    """Return what every rank has whole as terms of a sum: the sum over ranks is `parts` times as much."""
    state = fact.states[axis]
    if isinstance(state, PartialSum):
        return fact
    if isinstance(state, Zero):
        return fact.at(axis, PARTIAL_SUM)
    if isinstance(state, Same | Constant):
        return fact.times(Fraction(parts)).at(axis, PARTIAL_SUM)
    raise NoFact("a shard is added to a term of a sum")


def summed(fact: Fact, axis: int, axes: Sequence[Axis], reduction: str) -> Fact:
    """Return what an all_reduce over an axis makes of it. Raises NoFact."""
    parts = axes[axis].size
    if reduction not in ("sum", "avg"):
        raise NoFact(f"an all_reduce by {reduction}", axes[axis].name)
    factor = Fraction(1, parts) if reduction == "avg" else Fraction(1)
    state = fact.states[axis]
    if isinstance(state, Shard):
        raise NoFact("shards of different places are added", axes[axis].name)
    found = as_terms(fact, axis, parts).times(factor)
    return found.at(axis, state if isinstance(state, Constant | Zero) else SAME)


def gathered(fact: Fact, axis: int, axes: Sequence[Axis]) -> Fact:
    """Return what an all_gather along dim 0 over an axis makes of it. Raises NoFact."""
    state = fact.states[axis]
    if not isinstance(state, Shard):
        raise NoFact(f"what is gathered is {state}", axes[axis].name)
    dim, outer = state.dim, state.outer
    states = list(fact.states)
    states[axis] = SAME
    inner = [i for i in range(axis + 1, len(axes)) if _divides(states[i], dim)]
    if len(inner) > 1:
        raise NoFact("three axes divide the dim that is gathered", axes[axis].name)
    if outer is None or outer == 1:
        for i in inner:  # each gathered part holds a part of its own of the other axis
            later = states[i]
            assert isinstance(later, Shard)
            states[i] = Shard(dim, None if later.outer is None else later.outer * axes[axis].size)
    elif not (len(inner) == 1 and states[inner[0]] == Shard(dim, 1) and outer == axes[inner[0]].size):
        raise NoFact("a strided shard is gathered", axes[axis].name)
    pieces = None if dim == 0 else TensorPieces(dim, axes[axis].size, None)
    return replace(fact, states=tuple(states), pieces=pieces)


def scattered(fact: Fact, axis: int, dim: int, axes: Sequence[Axis]) -> Fact:
    """Return the own piece, of as many as the axis has ranks, of what is whole on it. Raises NoFact."""
    if isinstance(fact.states[axis], Constant | Zero):
        return fact
    if not isinstance(fact.states[axis], Same):
        raise NoFact(f"a piece of what is {fact.states[axis]}", axes[axis].name)
    states = list(fact.states)
    states[axis] = Shard(dim, 1)
    inner = [i for i in range(axis + 1, len(axes)) if _divides(states[i], dim)]
    if len(inner) > 1:
        raise NoFact("three axes divide the dim that is cut", axes[axis].name)
    for i in inner:
        later, parts = states[i], axes[axis].size
        assert isinstance(later, Shard)
        if later.outer == 1:  # what the other axis has in one run is cut: this axis comes inside of it
            states[axis] = Shard(dim, axes[i].size)
        elif later.outer is not None and later.outer % parts == 0:
            states[i] = Shard(dim, later.outer // parts)
        elif later.outer is not None:
            raise NoFact("a strided shard is cut", axes[axis].name)
    return replace(fact, states=tuple(states))


def reduce_scattered(fact: Fact, axis: int, axes: Sequence[Axis], reduction: str) -> Fact:
    """Return what a reduce_scatter along dim 0 over an axis makes of it. Raises NoFact."""
    dim = 0
    if fact.pieces is not None:
        if fact.pieces.index is not None or fact.pieces.parts != axes[axis].size:
            raise NoFact("other pieces than ranks are scattered", axes[axis].name)
        dim = fact.pieces.dim
    return scattered(replace(summed(fact, axis, axes, reduction), pieces=None), axis, dim, axes)


def cut(fact: Fact, dim: int, parts: int) -> list[Fact]:
    """Return the pieces of a tensor that is cut into equal parts along a dim."""
    if fact.pieces is None:
        return [replace(fact, pieces=TensorPieces(dim, parts, i)) for i in range(parts)]
    if fact.pieces.index is None and dim == 0 and parts == fact.pieces.parts:
        return [replace(fact, pieces=replace(fact.pieces, index=i)) for i in range(parts)]
    return []


def joined(pieces: Sequence[Fact], dim: int) -> Fact | None:
    """Return what pieces make that are joined along a dim; None if they are not all of one tensor, in order."""
    first = pieces[0].pieces
    if first is None or first.parts != len(pieces):
        return None
    whole = replace(pieces[0], pieces=None)
    for i, piece in enumerate(pieces):
        if piece != replace(whole, pieces=replace(first, index=i)):
            return None
    if dim == first.dim:
        return whole
    return replace(whole, pieces=replace(first, index=None)) if dim == 0 else None


def _divides(state: State, dim: int) -> bool:
    return isinstance(state, Shard) and state.dim == dim
