"""Integers that depend on a rank's place in the mesh, and the sizes and beginnings of shards that are such integers.
One generated text serves every rank of a role, so an argument such as the start of an `arange` shard cannot be a
number: it is `5 + 20 * index(tp)`, or, of shards of unequal sizes, `(0, 7, 14, 20)[index(tp)]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from op_registry.call import AxisShard, instances_in
from op_registry.spec import Refusal

Coefficient = int | tuple[int, ...]  # times the index; or the value at each index


@dataclass(frozen=True, slots=True)
class Expression:
    """`constant` plus, for each axis, a number times `index(axis)` or an entry of a table at `index(axis)`.
    `index(axis)` is the rank's coordinate on a mesh axis."""

    constant: int = 0
    terms: tuple[tuple[str, Coefficient], ...] = ()

    def __add__(self, other: Expression | int) -> Expression:
        if isinstance(other, int):
            return Expression(self.constant + other, self.terms)
        merged: dict[str, Coefficient] = dict(self.terms)
        for axis, coefficient in other.terms:
            merged[axis] = _sum(merged.get(axis, 0), coefficient)
        return Expression(self.constant + other.constant, tuple((a, c) for a, c in merged.items() if c))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Expression:
        return Expression(self.constant * factor, tuple((a, _times(c, factor)) for a, c in self.terms if factor))

    __rmul__ = __mul__

    def evaluate(self, coordinates: Mapping[str, int]) -> int:
        """Return the value on the rank with these coordinates."""
        return self.constant + sum(
            c[coordinates[a]] if isinstance(c, tuple) else c * coordinates[a] for a, c in self.terms
        )

    def over(self, sizes: Mapping[str, int]) -> tuple[int, Mapping[str, tuple[int, ...]]] | None:
        """Return the value at index 0 of every axis, and the increment at each index.

        These are the same for all expressions of the same values. None where an axis does not exist or a table has
        another length. `sizes`: of the axes.
        """
        constant, tables = self.constant, dict[str, tuple[int, ...]]()
        for axis, coefficient in self.terms:
            size = sizes.get(axis)
            if size is None or (isinstance(coefficient, tuple) and len(coefficient) != size):
                return None
            table = coefficient if isinstance(coefficient, tuple) else tuple(i * coefficient for i in range(size))
            constant += table[0]
            table = tuple(value - table[0] for value in table)
            if any(table):
                tables[axis] = table
        return constant, tables

    def __str__(self) -> str:
        texts = [f"{c}[index of {a}]" if isinstance(c, tuple) else f"{c} * index of {a}" for a, c in self.terms]
        return " + ".join([str(self.constant)] * (self.constant != 0 or not texts) + texts)


def depends_on_rank(value: Any) -> bool:
    """Return whether an argument, or one that is nested in it, is computed from the rank's place."""
    return next(instances_in(value, Expression), None) is not None


def _sum(a: Coefficient, b: Coefficient) -> Coefficient:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    length = len(a) if isinstance(a, tuple) else len(b) if isinstance(b, tuple) else 0
    first, second = ([i * c for i in range(length)] if isinstance(c, int) else c for c in (a, b))
    return tuple(x + y for x, y in zip(first, second, strict=True))


def _times(coefficient: Coefficient, factor: int) -> Coefficient:
    return coefficient * factor if isinstance(coefficient, int) else tuple(value * factor for value in coefficient)


def index(axis: str) -> Expression:
    """Return the rank's coordinate on `axis`, from 0."""
    return Expression(0, ((axis, 1),))


def by_index(axis: str, values: Sequence[int]) -> Expression:
    """Return the entry of `values` at the rank's coordinate on `axis`."""
    return Expression(0, ((axis, tuple(values)),))


# How large the shard of an identifier is, and where it begins: numbers, or expressions of a rank's place.


def local_size(total: int, axes: Sequence[AxisShard]) -> int | Expression:
    """Return the size of one rank's part of `total`: a multiple of the size of an identifier that these axes split. Of
    a slice that has what is before it, that is where it ends.

    Raises `Refusal` where it does not divide.
    """
    axes = [a for a in axes if a.parts > 1]
    if any(a.prefix for a in axes):
        return _end_of_slice(total, axes)
    uneven = next((a for a in axes if a.sizes), None)
    if uneven is None:
        parts = prod(a.parts for a in axes)
        if total % parts:
            raise Refusal(f"{total} does not divide by {parts}")
        return total // parts
    whole = sum(uneven.sizes) * uneven.outer
    if len(axes) > 1:
        raise Refusal(f"{total} is split by a second axis beside the unequal sizes {uneven.sizes}")
    if len(uneven.sizes) != uneven.parts or total % whole:
        raise Refusal(f"{total} does not divide into the sizes {uneven.sizes}")
    times = total // whole * uneven.outer
    return by_index(uneven.axis, [size * times for size in uneven.sizes])


def _end_of_slice(total: int, axes: Sequence[AxisShard]) -> Expression:
    sizes = axes[0].sizes or (1,) * axes[0].parts
    if len(axes) > 1 or total % sum(sizes):
        raise Refusal(f"{total} does not divide into slices")
    unit = total // sum(sizes)
    if axes[0].sizes:
        return by_index(axes[0].axis, [unit * end for end in accumulate(sizes)])
    return unit + unit * index(axes[0].axis)


def block_start(identifier: str, size: int, axes: Sequence[AxisShard]) -> Expression:
    """Return the first entry of the shard of an identifier of `size`, split into contiguous blocks by one axis.

    Raises `Refusal` when the shard is no single block.
    """
    if len(axes) != 1 or not axes[0].contiguous:
        raise Refusal(
            f"`{identifier}` can only be split into contiguous blocks by one axis; drop other axes, outer or sections"
        )
    (only,) = axes
    if only.sizes:
        return by_index(only.axis, [0, *accumulate(only.sizes[:-1])])
    return index(only.axis) * (size // only.parts)
