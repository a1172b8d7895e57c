"""Seconds of collectives by size, through measured points: algorithms change with the size, so that no line fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nnscaler.planning.cost.model import Collective
from nnscaler.planning.cost.table import CollectiveEntry


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising curve, linear between measured sizes.

    Below the first size it is constant; beyond the last it rises at the mean slope between the first and the last.

    sizes   bytes, ascending
    times   seconds, never falling
    """

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, size: float) -> float:
        last = self.sizes[-1]
        if size <= last or len(self.sizes) == 1:
            return float(np.interp(size, self.sizes, self.times))
        slope = (self.times[-1] - self.times[0]) / (last - self.sizes[0])
        return self.times[-1] + slope * (size - last)


def fit_curve(measured: Iterable[CollectiveEntry]) -> Curve:
    """Fit a curve through entries of one kind and number of ranks by isotonic regression (pool adjacent violators).

    A time that is above that of a larger size is noise: of these, each gets their mean.
    """
    entries = sorted(measured, key=lambda e: e.size)
    pools: list[tuple[float, int]] = []  # mean, count
    for entry in entries:
        pools.append((entry.seconds, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, count), (other, more) = pools[-2:]
            pools[-2:] = [((mean * count + other * more) / (count + more), count + more)]
    times = [mean for mean, count in pools for _ in range(count)]
    return Curve(tuple(float(e.size) for e in entries), tuple(times))


def fit_curves(measured: Sequence[CollectiveEntry]) -> dict[tuple[Collective, int], Curve]:
    """Return a curve for each kind and number of ranks."""
    keys = dict.fromkeys((e.kind, e.ranks) for e in measured)
    return {key: fit_curve(e for e in measured if (e.kind, e.ranks) == key) for key in keys}


def from_others(measured: Sequence[CollectiveEntry]) -> list[tuple[float, float]]:
    """Return (seconds, prediction of the curve through the others) of each entry whose size lies between others of its
    kind."""
    found = []
    for entry in measured:
        others = [e for e in measured if (e.kind, e.ranks) == (entry.kind, entry.ranks) and e is not entry]
        if any(e.size < entry.size for e in others) and any(e.size > entry.size for e in others):
            found.append((entry.seconds, fit_curve(others).seconds(entry.size)))
    return found
