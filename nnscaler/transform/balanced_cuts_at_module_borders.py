"""Cut a pipeline at the borders of modules, balanced, for models whose layers have no numbers.

A place between two operations lies inside of every module that both run in: a cut there goes through these modules. Few
open modules make a good place, since little but the result of a module crosses its border, and since people know the
modules of their model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.graph import Operation

INSIDE = 0.05  # of its bytes that a cut counts more for each module that it goes through
ENOUGH = 32  # blocks of equal cost from which some stages can be made that are nearly even


@dataclass(frozen=True, slots=True)
class Block:
    """Operations between two places at which the planner may cut.

    weight      of the bytes that a cut before the block sends, see `weight_of`
    operations  names, in order
    """

    weight: float
    operations: tuple[str, ...]


def weight_of(depth: int) -> float:
    """Return how often the bytes count that a cut through `depth` modules sends."""
    return 1 + INSIDE * depth


def open_modules(operations: Sequence[Operation]) -> list[int]:
    """Return, per place (place i lies before operation i), the number of modules that a cut there goes through."""
    paths = [op.module.split(".") if op.module else [] for op in operations]
    return [0, *(_shared(before, after) for before, after in pairwise(paths)), 0]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the common start of two module paths."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def outermost(depths: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Return those of the places at which the fewest modules are open."""
    fewest = min(depths[place] for place in places)
    return tuple(place for place in places if depths[place] == fewest)


def blocks_of(
    operations: Sequence[Operation], forbidden: Collection[int], cost: Callable[[Operation], float]
) -> tuple[Block, ...]:
    """Cut the operations at the borders of modules into blocks none of which has more than 1 / `ENOUGH` of the cost,
    where single operations allow that.

    A part that has more is cut at all places where the fewest modules are open, and its parts again. There is no cut at
    a `forbidden` place.
    """
    depths = open_modules(operations)
    total = list(accumulate(map(cost, operations), initial=0.0))
    edges, waiting = {0, len(operations)}, [(0, len(operations))]
    while waiting:
        start, end = waiting.pop()
        places = [place for place in range(start + 1, end) if place not in forbidden]
        if places and (total[end] - total[start]) * ENOUGH > total[-1]:
            found = outermost(depths, places)
            edges.update(found)
            waiting += pairwise([start, *found, end])
    cut = pairwise(sorted(edges))
    return tuple(Block(weight_of(depths[start]), tuple(op.name for op in operations[start:end])) for start, end in cut)


def describe_modules(part: Sequence[Operation], operations: Sequence[Operation]) -> str:
    """`stem .. block2 (part)`: the first and the last of the outermost modules that lie whole in a part of all
    `operations`; ` (part)` marks a module that does not. Outside of modules, the names of operations."""
    names = {op.name for op in part}
    crossing = {module for op in operations if op.name not in names for module in _around(op)}
    ends = []
    for op in (part[0], part[-1]):
        whole = [module for module in _around(op) if module not in crossing]
        ends.append(whole[0] if whole else f"{op.module} (part)" if op.module else op.name)
    first, last = ends
    return first if first == last else f"{first} .. {last}"


def _around(op: Operation) -> list[str]:
    """Return the modules that an operation runs in, outermost first."""
    parts = op.module.split(".") if op.module else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


# Cutting a sequence of costs into contiguous segments, balanced exactly.

TOLERANCE = 1e-9  # costs that differ by less (relatively) are equal: they are sums in different orders


def balanced_cuts(
    costs: Sequence[float],
    cuts: Sequence[int],
    groups: Sequence[int],
    crossing: Sequence[int],
    segments: int,
    limits: Sequence[tuple[int, int]] | None = None,
    slack: float = 0.0,
) -> tuple[int, ...] | None:
    """Return the positions of the best `segments - 1` cuts of the items with these `costs`; None if there are too few
    cuts.

    `cuts` are candidate positions (a cut at c lies before item c) in ascending order; `groups` (ascending numbers)
    says which of them are alternatives: of one group at most one is used. `limits`: the least and the greatest
    position of every cut. Minimises, in this order, the largest cost
    of a segment, the sum of `crossing` over the cuts used, the sum of squared costs of segments. `slack`: the share of
    the least possible largest cost by which the largest may be above it, for the sake of `crossing`.

    Exact: the linear partition problem (Bokhari 1988, partitioning of a chain), by dynamic programming over all pairs
    of candidates, once for the largest cost, and once over the segments that are no larger, for the rest. O(segments *
    candidates^2) in numpy.
    """
    if segments == 1:
        return ()
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs if any(costs) else [1.0] * len(costs)))])
    positions = np.array([0, *cuts, len(costs)])
    group = np.array([min(groups, default=1) - 1, *groups, max(groups, default=0) + 1])
    weight = np.array([0, *crossing, 0], dtype=np.float64)
    segment = np.where(group[None, :] > group[:, None], total[positions][None, :] - total[positions][:, None], np.inf)
    within = [np.ones(len(positions), dtype=np.bool_)] * (segments - 1)
    if limits is not None:
        within = [(positions >= least) & (positions <= most) for least, most in limits]
    limit = _smallest_maximum(segment, within)
    if not np.isfinite(limit):
        return None
    allowed = segment <= limit * (1 + slack + TOLERANCE)
    squares = np.where(allowed, np.round(np.square(np.where(allowed, segment, 0.0) / limit), 9), np.inf)
    return tuple(int(positions[i]) for i in _fewest_crossing(allowed, squares, weight, within))


def cut_limits(segments: int, items: int, at: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the least and the greatest position of every cut, so that these (item, segment) hold.

    Segments from -1 down are counted from the last one. None where a segment does not exist.
    """
    least, most = [1] * (segments - 1), [items - 1] * (segments - 1)
    for item, wanted in at:
        segment = wanted if wanted >= 0 else segments + wanted
        if not 0 <= segment < segments:
            return None
        for cut in range(segments - 1):
            if cut < segment:
                most[cut] = min(most[cut], item)
            else:
                least[cut] = max(least[cut], item + 1)
    return tuple(zip(least, most, strict=True))


def _smallest_maximum(segment: NDArray[np.float64], within: Sequence[NDArray[np.bool_]]) -> float:
    """Return the least possible largest segment, with the cuts `within` positions; infinite when there is no such
    partition."""
    largest = segment[0]
    for here in within:
        largest = np.maximum(np.where(here, largest, np.inf)[:, None], segment).min(axis=0)
    return float(largest[-1])


def _fewest_crossing(
    allowed: NDArray[np.bool_],
    squares: NDArray[np.float64],
    weight: NDArray[np.float64],
    within: Sequence[NDArray[np.bool_]],
) -> list[int]:
    """Return the indices of the cuts that minimise (crossing, squares) over partitions into allowed segments."""
    cross = np.where(allowed[0], 0.0, np.inf)
    square = squares[0]
    columns = np.arange(len(weight))
    came_from = []
    for here in within:
        crossing = np.where(allowed, np.where(here, cross + weight, np.inf)[:, None], np.inf)
        cross = crossing.min(axis=0)
        ties = np.isfinite(crossing) & (crossing == cross[None, :])
        candidates = np.round(np.where(ties, square[:, None] + squares, np.inf), 9)
        best = candidates.argmin(axis=0)
        square = candidates[best, columns]
        came_from.append(best)
    cuts = [len(weight) - 1]
    for best in reversed(came_from):
        cuts.append(int(best[cuts[-1]]))
    return cuts[:0:-1]
