"""Lower bounds of schedules: what none of a problem can beat, in closed form. Fast enough for thousands of problems.

Three facts, each for a device:

* Work. A set of its blocks runs one after another. Before the first of them the least head must have passed, and after
  the last the least tail. Any set gives a bound; those of the form (head at least h, tail at least t) hold the best.
* Memory. What a micro-batch takes is held at least for the longest path to what gives it back. The limit times the
  time in which the device can hold anything bounds the sum over all micro-batches (Little 1961).
* Path. A micro-batch takes the longest path, and the others pass its blocks one after another.

The period is the mean time from one micro-batch to the next in a long step. Work and memory bound it too: they are
ResMII and, where memory feeds back, RecMII of modulo scheduling (Rau 1994).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.search.job_shop_graph import Shop, shop_of
from nnscaler.scheduling.search.problem import ScheduleProblem

SLACK = 1e-9  # relative: what sums of floats may differ by


@dataclass(frozen=True, slots=True)
class ScheduleBound:
    """Lower bounds of every schedule.

    makespan   unit of the durations: of the whole step
    period     unit of the durations: mean time from one micro-batch to the next in a long step
    reason     what proves the makespan
    """

    makespan: float
    period: float
    reason: str


def bound(problem: ScheduleProblem) -> ScheduleBound:
    """Return a lower bound of the makespan and of the period. Raises what `check_memory` raises."""
    shop = shop_of(problem)
    check_memory(shop)
    return bound_of(shop)


def bound_of(shop: Shop) -> ScheduleBound:
    """Return the bounds of a problem that fits into its memory."""
    count = shop.problem.micro_batches
    best = (0.0, "nothing runs")
    for device, own in enumerate(shop.own):
        if own:
            best = max(best, (_work(shop, own), f"the work of device {device}"), key=lambda b: b[0])
    period = max(shop.loads, default=0.0)
    for device in range(shop.problem.devices):
        held = sum(amount * span for _, _, amount, span in holdings(shop, device))
        usable = usable_limit(shop, device)
        if held and 0 < usable < inf:
            period = max(period, held / usable)
            ends = [b for b in shop.own[device] if shop.problem.blocks[b].frees]
            head = min(shop.heads[b] for b in shop.own[device] if shop.problem.blocks[b].allocates)
            span = head + count * held / usable + min(shop.tails[b] for b in ends)
            best = max(best, (span, f"the memory of device {device}"), key=lambda b: b[0])
    return ScheduleBound(best[0], period, best[1])


def _work(shop: Shop, own: tuple[int, ...]) -> float:
    """Return the best bound by the work of one device, over all pairs of a head and a tail."""
    count, blocks = shop.problem.micro_batches, shop.problem.blocks
    best = 0.0
    for tail in {shop.tails[b] for b in own}:
        load = 0.0
        late = sorted((b for b in own if shop.tails[b] >= tail), key=lambda b: -shop.heads[b])
        for block in late:  # the sets grow as the head falls
            load += blocks[block].duration
            best = max(best, shop.heads[block] + count * load + tail)
    # a block's own micro-batches, between the longest paths to and from it
    return max(best, *(shop.heads[b] + count * blocks[b].duration + shop.tails[b] for b in own))


def holdings(shop: Shop, device: int) -> list[tuple[int, int, float, float]]:
    """Return what one micro-batch must hold on a device: (who takes it, who gives it back, bytes, least time).

    What is taken is matched with what gives it back later, the longest paths first. Every such matching is a bound.
    """
    blocks = shop.problem.blocks
    takes = {b: blocks[b].allocates for b in shop.own[device] if blocks[b].allocates}
    gives = {b: blocks[b].frees for b in shop.own[device] if blocks[b].frees}
    pairs = []
    for taker in takes:
        spans = shop.span_from(taker)
        pairs += [(spans[giver], taker, giver) for giver in gives if spans[giver] > 0]
    held = []
    for span, taker, giver in sorted(pairs, key=lambda p: (-p[0], p[1], p[2])):
        amount = min(takes[taker], gives[giver])
        takes[taker] -= amount
        gives[giver] -= amount
        if amount:
            held.append((taker, giver, amount, span))
    return held


def usable_limit(shop: Shop, device: int) -> float:
    """Return how much of a device's limit its blocks can fill: where all take multiples of one size, only those."""
    limit = shop.problem.limits[device]
    sizes = [a for b in shop.own[device] for a in (shop.problem.blocks[b].allocates, shop.problem.blocks[b].frees) if a]
    if limit == inf or not sizes or any(size != int(size) for size in sizes):
        return limit
    unit = gcd(*map(int, sizes))
    return (limit + SLACK * limit) // unit * unit


def memory_needed(shop: Shop, device: int) -> tuple[float, float]:
    """Return the bytes that one micro-batch alone is proved to need on a device, and what suffices for it.

    Needed: at the start of some block, all that it and the blocks before it take, less all that other blocks can give
    back by then. Sufficient: the blocks in one order that fits their dependencies, givers first.
    """
    blocks = shop.problem.blocks
    own = shop.own[device]
    needed = 0.0
    for block in own:
        before = shop.ancestors[block]
        taken = sum(blocks[b].allocates for b in own if before >> b & 1) + blocks[block].allocates
        after = [b for b in own if b == block or shop.ancestors[b] >> block & 1]
        given = sum(blocks[b].frees for b in own if b not in after)
        needed = max(needed, blocks[block].allocates, taken - given)
    live = enough = 0.0
    for block in shop.alone:
        if block in own:
            live += blocks[block].allocates
            enough = max(enough, live)
            live -= blocks[block].frees
    return needed, enough


def check_memory(shop: Shop) -> None:
    """Check that one micro-batch fits: then they all fit, one after the other.

    Raises NnscalerError("schedule_memory") with the limit that is proved necessary and one that suffices.
    """
    for device in range(shop.problem.devices):
        limit = shop.problem.limits[device]
        needed, enough = memory_needed(shop, device)
        if enough > limit * (1 + SLACK):
            known = "no schedule" if needed > limit * (1 + SLACK) else "none of the orders tried"
            raise NnscalerError(
                "schedule_memory",
                f"{known} fits into the {limit:g} bytes of device {device}: one micro-batch alone needs {needed:g}",
                help=f"{needed:g} bytes are proved necessary there, and {enough:g} suffice; else move a stage away",
            )
