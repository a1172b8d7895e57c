"""Partition layers into pipeline stages so that a step is shortest: exact, by dynamic programming over stages.

The step of a pipeline is a sum over its stages plus a multiple of the largest one. As in Alpa (Zheng et al. 2022), the
largest is bounded by each possible value in turn, and at such a limit the least sum is a shortest path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nnscaler.planning.solver.sweep_memory_price import ROUNDING

Numbers = NDArray[np.float64]


class StagePartition(NamedTuple):
    """Layers spread over stages.

    value    seconds of a step
    layers   by stage, how many layers it has
    states   by stage, the states of the cut that it begins and ends in
    """

    value: float
    layers: tuple[int, ...]
    states: tuple[tuple[int, int], ...]


class Together(NamedTuple):
    """The time of a stage itself, and the time that it adds to the step, as one bound.

    seconds   of the same shape as those of the stages: at least what a stage takes, and 1 / often of what it adds
    often     so that where no stage takes more than t, this one adds at least often * (seconds - t)
    """

    seconds: Numbers
    often: float


def best_cut(
    seconds: Numbers, layers: int, weight: float, added: Numbers | None = None, together: Together | None = None
) -> StagePartition | None:
    """Minimise the sum of what the stages add plus `weight` times the largest of their seconds; None where the layers
    cannot be spread. A stage adds its seconds, or `added` of the same shape, or more where `together` says so.

    `seconds` is [stages, most + 1, states, states]: what a stage takes with 0, 1, ... layers that begins and ends in
    these states of the tensors it is handed and hands on; infinite where it cannot be. A stage begins as the one before
    it ended. At a limit for the largest stage, the least sum is a shortest path; the limits are tried in ascending
    order, until the largest stage alone costs more than the best so far, or the best so far is no more than what all
    stages take and add together.

    With `together`, the sum at a limit falls as the limit rises, by no more than `weight` times as much if `often` is
    weight / stages or less; so a spread is worth most at its own largest stage, and the least of all limits bounds it.
    """
    assert together is None or together.often * len(seconds) <= weight * (1 + 1e-9)
    every = seconds if added is None else np.where(np.isfinite(seconds), added, np.inf)

    def within(limit: float) -> StagePartition | None:
        """Return the least sum with no stage over the limit."""
        if together is None:
            return _path(every, seconds, layers, limit)
        more = np.maximum(every, together.often * (together.seconds - limit))
        return _path(more, seconds, layers, limit)

    free = _path(every, seconds, layers, np.inf)
    if free is None:
        return None
    floor = -np.inf  # of all limits: weight * limit + often * (seconds - limit) of every stage, or more
    if together is not None:
        whole = np.where(np.isfinite(seconds), together.often * together.seconds, np.inf)
        found = _path(whole, seconds, layers, np.inf)
        floor = found.value if found is not None else np.inf
    limits = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, len(limits) - 1
    while low < high:  # the least limit at which there may be a path
        middle = (low + high) // 2
        if _most(seconds, limits[middle]) < layers:
            low = middle + 1
        else:
            high = middle
    best: StagePartition | None = None
    while low < len(limits):
        if best is not None and max(weight * limits[low] + free.value, floor) >= best.value * (1 - ROUNDING):
            break
        found = within(limits[low])
        if found is None:
            low += 1
            continue
        taken = enumerate(zip(found.layers, found.states, strict=True))
        largest = max(float(seconds[stage, count, a, b]) for stage, (count, (a, b)) in taken)
        value = found.value + weight * largest
        if best is None or value < best.value:
            best = StagePartition(value, *found[1:])
        # up to the next limit that the least sum so far allows to pay
        low = max(low + 1, int(np.searchsorted(limits, largest, side="right")))
    return best


def _most(seconds: Numbers, limit: float) -> float:
    """Return the most layers that stages under the limit may have together; -inf for none."""
    counts = np.arange(seconds.shape[1], dtype=np.float64)[:, None, None]
    most = np.where(seconds <= limit, counts, -np.inf).max(axis=1)  # [stages, states, states]
    # [states]: the most layers up to here that end in each state
    reached = np.zeros(seconds.shape[2])
    for stage in most:
        reached = (reached[:, None] + stage).max(axis=0)
    return float(reached.max())


def _path(added: Numbers, seconds: Numbers, layers: int, limit: float) -> StagePartition | None:
    """Return the least sum of `added` with no stage over the limit, by a dynamic program over stages and layers."""
    allowed = np.where(seconds <= limit, added, np.inf)
    used = np.flatnonzero(np.isfinite(allowed).any(axis=(0, 2, 3)))
    if not len(used):
        return None
    allowed = allowed[:, : used[-1] + 1]
    stages, counts, states, _ = allowed.shape
    # [counts - 1 + layers + 1, states]: rows before the first layer are infinite, so that every window has the same
    # length
    padded = np.full((counts - 1 + layers + 1, states), np.inf)
    before = padded[counts - 1 :]  # [l, a]: the best way to l layers
    # [l, n, a]: the best way to what comes before n layers of a stage that ends at l
    start = sliding_window_view(padded, counts, axis=0).transpose(0, 2, 1)[:, ::-1]
    before[0] = 0.0
    taken = []
    rows = np.arange(layers + 1)[:, None], np.arange(states)[None, :]
    for stage in range(stages):
        # [layers + 1, counts, states, states]: the sum up to the end of this stage, by how many layers it has and by
        # its states
        every = start[..., None] + allowed[stage][None]
        flat = every.reshape(layers + 1, counts * states, states)
        # [layers + 1, states]: the best number of layers and first state, as one number
        taken.append(flat.argmin(axis=1))
        before[:] = flat[rows[0], taken[-1], rows[1]]
    # read the choices off, from the last stage to the first
    state = int(before[layers].argmin())
    value = float(before[layers, state])
    if not np.isfinite(value):
        return None
    found, ends, at = [], [], layers
    for choice in reversed(taken):
        count, begin = divmod(int(choice[at, state]), states)
        found.append(count)
        ends.append((begin, state))
        at, state = at - count, begin
    return StagePartition(value, tuple(reversed(found)), tuple(reversed(ends)))
