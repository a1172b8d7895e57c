"""Rules for list scheduling, and their improvement by running a schedule backwards and forwards.

A schedule of the mirrored problem (time runs backwards, what is taken is given back) is one of the problem. Scheduling
the mirror in the order of a schedule's ends, and the problem in the order of the starts that result, moves everything
as late and then as early as it can be (double justification, Valls, Ballestin and Quintanilla 2005). It closes nearly
all of what a rule leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nnscaler.scheduling.search.bound import SLACK
from nnscaler.scheduling.search.greedy import Keys, list_schedule
from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, makespan_of, peaks_of, replay, sequences, shop_of

FIRST_PASSES = 3  # of each rule before the next one is tried


@dataclass(frozen=True, slots=True)
class FoundCandidate:
    """A schedule that was found.

    starts     of the blocks
    makespan   of it
    source     what found it
    """

    starts: Starts
    makespan: float
    source: str


def rules_of(shop: Shop) -> Iterator[tuple[str, Keys]]:
    """Yield the rules, the most promising ones first.

    In a steady pipeline, block b of micro-batch i comes up at its head plus i times the period: that is the base of two
    rules, with and without W at the end of all. The others take backward or forward first, the deepest stage first.
    """
    blocks, count = shop.problem.blocks, shop.problem.micro_batches
    period = max(shop.loads)
    far = 4 * (count + 1) * (max(shop.heads) + period + 1)  # beyond every other term

    def keys(offsets: list[float], step: float) -> Keys:
        return [[offset + step * i for i in range(count)] for offset in offsets]

    heads = shop.heads
    weights_last = [far if b.kind == "W" else 0.0 for b in blocks]
    yield "in step, W last", keys([h + w for h, w in zip(heads, weights_last, strict=True)], period)
    yield "in step", keys(list(heads), period)
    deep = max(heads) + 1
    for name, order in (("backward first", "BIFW"), ("forward first", "FBIW")):
        offsets = [far * order.index(b.kind) - h / deep for b, h in zip(blocks, heads, strict=True)]
        yield name, keys(offsets, 1.0)


def mirrored(shop: Shop) -> Shop:
    """Return the problem in which time runs backwards."""
    problem = shop.problem
    blocks = tuple(replace(b, allocates=b.frees, frees=b.allocates) for b in problem.blocks)
    edges = tuple(replace(e, before=e.after, after=e.before) for e in problem.dependencies)
    return shop_of(replace(problem, blocks=blocks, dependencies=edges))


def turned(shop: Shop, starts: Starts) -> Starts:
    """Return the schedule of the mirrored problem that a schedule stands for."""
    whole = makespan_of(shop, starts)
    blocks = shop.problem.blocks
    return tuple(
        tuple(whole - start - block.duration for start in reversed(row))
        for row, block in zip(starts, blocks, strict=True)
    )


def settled(shop: Shop, starts: Starts) -> Starts:
    """Start everything as early as the same orders allow."""
    found = replay(shop, sequences(shop, starts))
    assert found is not None, "`sequences` puts nothing before what it waits for"
    return found


class Portfolio:
    """All rules, each with its best schedule so far. Changes as it runs."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.mirror = mirrored(shop)
        self.best: FoundCandidate | None = None
        self.passes = 0

    def take(self, starts: Starts, source: str) -> None:
        """Remember a schedule if it is the best one."""
        makespan = makespan_of(self.shop, starts)
        better = self.best is None or makespan < self.best.makespan * (1 - SLACK)
        if better and self._fits(starts):
            self.best = FoundCandidate(starts, makespan, source)

    def run(self, goal: float, rounds: int) -> None:
        """Try every rule, then improve each `rounds` times, until a schedule meets the goal."""
        joint = any(len(block.devices) > 1 for block in self.shop.problem.blocks)
        current: list[tuple[str, Starts]] = []
        for name, keys in rules_of(self.shop):
            for reserve in (True, False) if joint else (True,):
                self.passes += 1
                starts = list_schedule(self.shop, keys, reserve)
                if starts is not None:
                    source = f"rule: {name}{'' if reserve else ', nothing kept free'}"
                    self.take(starts, source)
                    current.append((source, self.justify(starts, source, goal, FIRST_PASSES - 1)))
                if self._met(goal):
                    return
        for _ in range(rounds):
            for index, (source, starts) in enumerate(current):
                current[index] = (source, self.justify(starts, source, goal, 2))
                if self._met(goal):
                    return

    def justify(self, starts: Starts, source: str, goal: float, passes: int) -> Starts:
        """Run a schedule backwards and forwards, so many passes in all; return the last one."""
        for number in range(passes):
            backwards = number % 2 == 0
            shop = self.mirror if backwards else self.shop
            keys = turned(self.shop, starts) if backwards else starts
            self.passes += 1
            found = list_schedule(shop, keys)
            if found is None:
                return starts
            starts = turned(self.mirror, found) if backwards else found
            self.take(settled(self.shop, starts) if backwards else starts, f"{source}, justified")
            if self._met(goal):
                break
        return starts

    def _fits(self, starts: Starts) -> bool:
        """Return whether a schedule fits into memory in the order of its times: several blocks at one time can differ
        in it from the order in which they were found."""
        peaks = peaks_of(self.shop, sequences(self.shop, starts))
        return all(peak <= limit * (1 + SLACK) for peak, limit in zip(peaks, self.shop.problem.limits, strict=False))

    def _met(self, goal: float) -> bool:
        return self.best is not None and self.best.makespan <= goal * (1 + SLACK)
