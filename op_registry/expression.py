"""Integers that depend on a rank's place in the mesh.

One generated text serves every rank of a role, so an argument such as the start of an `arange` shard cannot be a
number: it is `5 + 20 * index(tp)`. Affine forms suffice for every operator that we know of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expression:
    """`constant + sum(coefficient * index(axis))`, with `index(axis)` the rank's coordinate on a mesh axis."""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Expression | int) -> Expression:
        if isinstance(other, int):
            return Expression(self.constant + other, self.terms)
        merged: dict[str, int] = dict(self.terms)
        for axis, coefficient in other.terms:
            merged[axis] = merged.get(axis, 0) + coefficient
        return Expression(self.constant + other.constant, tuple((a, c) for a, c in merged.items() if c))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Expression:
        return Expression(self.constant * factor, tuple((a, c * factor) for a, c in self.terms if c * factor))

    __rmul__ = __mul__

    def evaluate(self, coordinates: Mapping[str, int]) -> int:
        """The value on the rank with these coordinates."""
        return self.constant + sum(c * coordinates[a] for a, c in self.terms)


def index(axis: str) -> Expression:
    """The rank's coordinate on `axis`, from 0."""
    return Expression(0, ((axis, 1),))
