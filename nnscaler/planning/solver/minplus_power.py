"""Powers of a table in the (min, +) semiring by repeated squaring, and the states along the best path.

The n-th power of the table of one segment is the table of n segments in a row: the entry of two states is the cost of
the shortest path between them. A table has axes [hub, before, after]: what a segment costs between two states of its
cut, for each choice of the hubs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nnscaler.planning.solver.problem import Table


@dataclass(frozen=True, slots=True, eq=False)
class Power:
    """The `count`-th power of a table.

    doubled    `doubled[j]` is the 2**j-th power: [hub, before, after]
    prefixes   products of the powers that make up `count`, the smallest first
    count      the exponent
    """

    doubled: tuple[Table, ...]
    prefixes: tuple[Table, ...]
    count: int

    @property
    def table(self) -> Table:
        """The power itself."""
        return self.prefixes[-1]


def multiply(first: Table, second: Table) -> Table:
    """Return the (min, +) product: the best over the state in the middle."""
    # [states]: whether any path goes through this state in the middle
    useful = np.isfinite(first).any(axis=(0, 1)) & np.isfinite(second).any(axis=(0, 2))
    answer = np.full((first.shape[0], first.shape[1], second.shape[2]), np.inf)
    for state in np.flatnonzero(useful):
        np.minimum(answer, first[:, :, state, None] + second[:, None, state, :], out=answer)
    return answer


def raise_to(table: Table, count: int) -> Power:
    """Return the `count`-th power of `table`, count at least one."""
    doubled = [table]
    while 2 ** len(doubled) <= count:
        doubled.append(multiply(doubled[-1], doubled[-1]))
    parts = [doubled[bit] for bit in _bits(count)]
    prefixes = [parts[0]]
    for part in parts[1:]:
        prefixes.append(multiply(prefixes[-1], part))
    return Power(tuple(doubled), tuple(prefixes), count)


def states(power: Power, hub: int, first: int, last: int) -> list[int]:
    """Return the `count` + 1 states of a best path from `first` to `last`."""
    bits = _bits(power.count)
    ends = [last]
    for index in range(len(bits) - 1, 0, -1):
        ends.append(_middle(power.prefixes[index - 1], power.doubled[bits[index]], hub, first, ends[-1]))
    path = [first]
    for bit, end in zip(bits, reversed(ends), strict=True):
        path += _inside(power, bit, hub, path[-1], end)
    return path


def _inside(power: Power, bit: int, hub: int, first: int, last: int) -> list[int]:
    """Return the states after `first` up to `last` of a path of 2**bit segments."""
    if bit == 0:
        return [last]
    half = power.doubled[bit - 1]
    middle = _middle(half, half, hub, first, last)
    return _inside(power, bit - 1, hub, first, middle) + _inside(power, bit - 1, hub, middle, last)


def _middle(before: Table, after: Table, hub: int, first: int, last: int) -> int:
    return int((before[hub, first] + after[hub, :, last]).argmin())


def _bits(count: int) -> list[int]:
    return [bit for bit in range(count.bit_length()) if count >> bit & 1]
