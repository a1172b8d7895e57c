"""Symbols for the whole and for every rank, and the equations that say that ranks make up the whole.

What lies where follows from the (value, gradient) table of `nnscaler.layout`, by the functions that the compiler and
the numeric checks use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
import torch

from nnscaler.layout import Partial, Sharded, State
from nnscaler.runtime.cut_tensors import pieces_of
from verify.evidence.smt.element_arithmetic import Element, Kind, Numbers
from verify.evidence.smt.semantics.element_arrays import Array, array

Pairs = list[tuple[Element, Element]]
Symbol = Callable[[str, Kind], Element]
"""From the name of an element of an input (or cotangent) to a symbol, or to a number."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor of the whole operator, and what each rank has of it."""

    whole: Array
    ranks: tuple[Array, ...]


def held(state: State, parts: int, shape: Sequence[int]) -> list[Array] | None:
    """Return for each rank, the places (row-major) of a whole tensor that it holds; None if it holds all of them."""
    if not isinstance(state, Sharded):
        return None
    places = torch.arange(prod(shape)).reshape(tuple(shape))
    return [piece.contiguous().numpy() for piece in pieces_of(places, state, parts)]


def local_shape(state: State, parts: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what a rank holds."""
    return state.shape_of(shape, parts, 0) if isinstance(state, Sharded) else tuple(shape)


def spread(
    algebra: Numbers, symbol: Symbol, name: str, kind: Kind, shape: Sequence[int], state: State, parts: int
) -> Spread:
    """Make values of a tensor in this state. A partial sum has values of its own on every rank."""

    def symbols(prefix: str) -> Array:
        return array([symbol(f"{prefix}[{i}]", kind) for i in range(prod(shape))], shape)

    if isinstance(state, Partial):
        ranks = [symbols(f"{name} on rank {rank}") for rank in range(parts)]
        return Spread(added(algebra, ranks), tuple(ranks))
    whole = symbols(name)
    return Spread(whole, tuple(cut(whole, state, parts)))


def cut(whole: Array, state: State, parts: int) -> list[Array]:
    """Return the piece of each rank of a value that is not a partial sum."""
    places = held(state, parts, whole.shape)
    if places is None:
        return [whole] * parts
    return [whole.reshape(-1)[at.reshape(-1)].reshape(at.shape) for at in places]


def added(algebra: Numbers, arrays: Sequence[Array]) -> Array:
    """Return the sum of arrays of one shape."""
    columns = zip(*(a.reshape(-1) for a in arrays), strict=True)
    return array([algebra.sum(column) for column in columns], arrays[0].shape)


def equations(algebra: Numbers, whole: Array, ranks: Sequence[Array], state: State) -> Pairs | None:
    """Return the pairs that must be equal for the ranks to make up the whole; None where a shape is wrong."""
    shape = local_shape(state, len(ranks), whole.shape)
    if any(r.shape != shape for r in ranks):
        return None
    if isinstance(state, Partial):
        if state.reduction == "sum":
            return _pairs(whole, added(algebra, ranks))
        columns = zip(*(r.reshape(-1) for r in ranks), strict=True)
        return _pairs(whole, array([reduce(algebra.maximum, column) for column in columns], shape))
    try:
        every = cut(whole, state, len(ranks))
    except ValueError:  # the whole does not divide
        return None
    return [pair for expected, found in zip(every, ranks, strict=True) for pair in _pairs(expected, found)]


def _pairs(a: Array, b: Array) -> Pairs:
    return list(zip(a.reshape(-1), b.reshape(-1), strict=True))


def zeros(shape: Sequence[int]) -> Array:
    """Return a gradient that is not there."""
    return np.full(tuple(shape), 0, dtype=object)
