"""Cutting a sequence of costs into contiguous segments, balanced exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-9  # costs that differ by less (relatively) are equal: they are sums in different orders


def balanced_cuts(
    costs: Sequence[float],
    cuts: Sequence[int],
    groups: Sequence[int],
    crossing: Sequence[int],
    segments: int,
) -> tuple[int, ...] | None:
    """The positions of the best `segments - 1` cuts of the items with these `costs`; None if there are too few cuts.

    `cuts` are candidate positions (a cut at c lies before item c) in ascending order; `groups` (ascending numbers)
    says which of them are alternatives: of one group at most one is used. Minimises, in this order, the largest cost
    of a segment, the sum of `crossing` over the cuts used, the sum of squared costs of segments. Exact: dynamic
    programming over all pairs of candidates, O(segments * candidates^2) in numpy.
    """
    if segments == 1:
        return ()
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs if any(costs) else [1.0] * len(costs)))])
    positions = np.array([0, *cuts, len(costs)])
    group = np.array([min(groups, default=1) - 1, *groups, max(groups, default=0) + 1])
    weight = np.array([0, *crossing, 0], dtype=np.float64)
    segment = np.where(group[None, :] > group[:, None], total[positions][None, :] - total[positions][:, None], np.inf)
    limit = _smallest_maximum(segment, segments)
    if not np.isfinite(limit):
        return None
    allowed = segment <= limit * (1 + TOLERANCE)
    squares = np.where(allowed, np.round(np.square(np.where(allowed, segment, 0.0) / limit), 9), np.inf)
    return tuple(int(positions[i]) for i in _fewest_crossing(allowed, squares, weight, segments))


def _smallest_maximum(segment: NDArray[np.float64], segments: int) -> float:
    """The least possible largest segment; infinite when there is no such partition."""
    largest = segment[0]
    for _ in range(segments - 1):
        largest = np.maximum(largest[:, None], segment).min(axis=0)
    return float(largest[-1])


def _fewest_crossing(
    allowed: NDArray[np.bool_], squares: NDArray[np.float64], weight: NDArray[np.float64], segments: int
) -> list[int]:
    """Indices of the cuts that minimise (crossing, squares) over partitions into allowed segments."""
    cross = np.where(allowed[0], 0.0, np.inf)
    square = squares[0]
    columns = np.arange(len(weight))
    came_from = []
    for _ in range(segments - 1):
        crossing = np.where(allowed, (cross + weight)[:, None], np.inf)
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
