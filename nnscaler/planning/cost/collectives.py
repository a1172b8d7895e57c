"""Price collectives on a cluster: the alpha-beta model (Hockney 1994), over each level of links that a group spans.

A group of n ranks on one level takes, for a tensor of S bytes,

all_gather, reduce_scatter   (n - 1) alpha + (n - 1) / n * S / bandwidth                 ring
all_reduce                   twice that, or 2 ceil(log2 n) alpha + 2 S / bandwidth       ring or double tree
all_to_all                   (n - 1) alpha + (n - 1) / n * (S / n) / bandwidth           a rank holds S / n
send                         alpha + S / bandwidth

and over several levels an all_reduce is a reduce_scatter inside, an all_reduce across of what is left, and an
all_gather inside; the other kinds likewise. Each call takes the time of a launch too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, log2
from types import MappingProxyType

import numpy as np

from nnscaler.communication_buckets import BUCKET_BYTES
from nnscaler.planning.cluster.description import Cluster, Level
from nnscaler.planning.cost.measured_profile import CollectiveEntry
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, CostModel

Spanned = tuple[tuple[int, Level], ...]


def seconds(cluster: Cluster, kind: Collective, size: float, ranks: AxisPlace) -> float:
    """Return the seconds of one call over the axis.

    A group that is larger than the cluster spans its outermost level.
    """
    if ranks.size == 1:
        return 0.0
    levels = spanned(cluster.spans, cluster.levels, ranks)
    return cluster.device.launch + _over(kind, size, ranks.size, levels)


@lru_cache(maxsize=4096)
def spanned(spans: tuple[int, ...], levels: tuple[Level, ...], ranks: AxisPlace) -> Spanned:
    """Return (members, level), innermost first: how many units of the level below the group joins on each level.

    Members that share a unit are counted by the largest aligned part of the axis, so that a group which straddles units
    irregularly is never taken to be closer than it is.
    """
    found: list[tuple[int, Level]] = []
    inside = 1
    for number, (span, level) in enumerate(zip(spans, levels, strict=True)):
        last = number == len(levels) - 1
        together = ranks.size if last else gcd(ranks.size, span // ranks.inner) if span % ranks.inner == 0 else 1
        if together > inside:
            found.append((together // inside, level))
            inside = together
    return tuple(found)


def _over(kind: Collective, size: float, members: int, levels: Spanned) -> float:
    match kind:
        case "all_gather" | "reduce_scatter":
            return _scatter(size, levels)
        case "all_reduce":
            *inner, (across, level) = levels
            left = size
            for count, _ in inner:
                left /= count
            return 2 * _scatter(size, inner) + _reduce(left, across, level)
        case "all_to_all":
            return _exchange(size, members, levels)
        case "send":
            level = levels[-1][1]
            return level.latency + size / level.bandwidth
    raise AssertionError(kind)


def _scatter(size: float, levels: Sequence[tuple[int, Level]]) -> float:
    """Return the seconds of a reduce_scatter or all_gather by rings, level by level; each level handles what the ones
    inside leave."""
    total, left = 0.0, size
    for members, level in levels:
        total += (members - 1) * level.latency + (members - 1) / members * left / level.bandwidth
        left /= members
    return total


def _reduce(size: float, members: int, level: Level) -> float:
    ring = 2 * ((members - 1) * level.latency + (members - 1) / members * size / level.bandwidth)
    tree = 2 * (ceil(log2(members)) * level.latency + size / level.bandwidth)
    return min(ring, tree)


def _exchange(size: float, members: int, levels: Spanned) -> float:
    """Return the seconds in which every rank sends size / members**2 bytes to each other one, over the level between
    the two."""
    total, inside = 0.0, 1
    for units, level in levels:
        peers = inside * (units - 1)
        total += peers * (level.latency + size / members**2 / level.bandwidth)
        inside *= units
    return total


# The cost of adding up the gradients of a step, which the runtime does in buckets.

# How often a bucket is copied between its flat memory and the tensors of parameters: a gradient into its place; a
# gathered part into the whole, and the whole into the leaf.
COPIES: Mapping[Collective, int] = MappingProxyType({"all_reduce": 1, "reduce_scatter": 1, "all_gather": 2})


def bucket_seconds(cost: CostModel, kind: Collective, size: float, ranks: AxisPlace) -> float:
    """Return the seconds of one bucket of so many bytes, whole along the axis, and of filling and emptying it."""
    return cost.collective(kind, size, ranks) + cost.copied(COPIES[kind] * size)


def seconds_per_byte(cost: CostModel, ranks: AxisPlace, kind: Collective = "all_reduce") -> float:
    """Return the seconds per byte of gradients that are added up over an axis, in full buckets."""
    return bucket_seconds(cost, kind, BUCKET_BYTES, ranks) / BUCKET_BYTES


# Seconds of collectives by size, through measured points: algorithms change with the size, so that no line fits.


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


def fit_curves(measured: Sequence[CollectiveEntry]) -> dict[tuple[Collective, int, int], Curve]:
    """Return a curve for each kind, number of ranks, and number of those that call at once."""
    found: dict[tuple[Collective, int, int], list[CollectiveEntry]] = {}
    for entry in measured:
        found.setdefault(_curve_of(entry), []).append(entry)
    return {key: fit_curve(entries) for key, entries in found.items()}


def busiest(measured: Sequence[CollectiveEntry]) -> list[CollectiveEntry]:
    """Return the entries that hold while all ranks communicate."""
    most = max((e.at_once for e in measured), default=0)
    return [e for e in measured if e.at_once == most]


def _curve_of(entry: CollectiveEntry) -> tuple[Collective, int, int]:
    return entry.kind, entry.ranks, entry.at_once


def from_others(measured: Sequence[CollectiveEntry]) -> list[tuple[float, float]]:
    """Return (seconds, prediction of the curve through the others) of each entry whose size lies between others of its
    kind."""
    found = []
    for entry in measured:
        others = [e for e in measured if _curve_of(e) == _curve_of(entry) and e is not entry]
        if any(e.size < entry.size for e in others) and any(e.size > entry.size for e in others):
            found.append((entry.seconds, fit_curve(others).seconds(entry.size)))
    return found
