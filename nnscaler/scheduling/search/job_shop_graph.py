"""A schedule problem as a job shop, and the longest paths in it: what every part of the search reads.

Devices serve one block at a time, and have memory. All micro-batches are alike. So those that pass a block may be
renamed in the order in which they do, and every schedule has an equal one in which each block runs the micro-batches in
their order; the search looks at no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from math import inf

from nnscaler.instructions import Instruction
from nnscaler.scheduling.search.problem import ScheduleProblem

Starts = tuple[tuple[float, ...], ...]  # by block and micro-batch: when it starts


@dataclass(frozen=True)
class Shop:
    """The problem, indexed.

    problem     the problem itself
    own         by device: its blocks, before each what it waits for
    sources     by block: (block that it waits for, lag)
    readers     by block: (block that waits for it, lag)
    order       all blocks, each after what it waits for
    """

    problem: ScheduleProblem
    own: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[tuple[int, float], ...], ...]
    readers: tuple[tuple[tuple[int, float], ...], ...]
    order: tuple[int, ...]

    @cached_property
    def heads(self) -> tuple[float, ...]:
        """By block: the time that must pass before it starts."""
        heads = [0.0] * len(self.order)
        for block in self.order:
            for source, lag in self.sources[block]:
                heads[block] = max(heads[block], heads[source] + self.problem.blocks[source].duration + lag)
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[float, ...]:
        """By block: the time that must pass after it ends."""
        tails = [0.0] * len(self.order)
        for block in reversed(self.order):
            for reader, lag in self.readers[block]:
                tails[block] = max(tails[block], lag + self.problem.blocks[reader].duration + tails[reader])
        return tuple(tails)

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """By device: its work for one micro-batch."""
        return tuple(sum(self.problem.blocks[b].duration for b in own) for own in self.own)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """By block: the blocks that end before it starts, as bits."""
        found = [0] * len(self.order)
        for block in self.order:
            for source, _ in self.sources[block]:
                found[block] |= found[source] | 1 << source
        return tuple(found)

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """All blocks in an order in which one micro-batch alone runs with little memory: of those that wait for
        nothing, that which adds the least, then that which takes the least."""
        blocks = self.problem.blocks
        unmet = [len(s) for s in self.sources]
        ready = [b for b in self.order if not unmet[b]]
        place = {b: i for i, b in enumerate(self.order)}
        order = []
        while ready:
            block = min(ready, key=lambda b: (blocks[b].allocates - blocks[b].frees, blocks[b].allocates, place[b]))
            ready.remove(block)
            order.append(block)
            for reader, _ in self.readers[block]:
                unmet[reader] -= 1
                if not unmet[reader]:
                    ready.append(reader)
        return tuple(order)

    def span_from(self, first: int) -> list[float]:
        """Return by block the least time from the start of `first` to its end; -inf where it does not wait for it."""
        spans = [-inf] * len(self.order)
        spans[first] = self.problem.blocks[first].duration
        for block in self.order:
            for source, lag in self.sources[block]:
                spans[block] = max(spans[block], spans[source] + lag + self.problem.blocks[block].duration)
        return spans


def shop_of(problem: ScheduleProblem) -> Shop:
    """Return the problem with its order."""
    count = len(problem.blocks)
    sources: list[dict[int, float]] = [{} for _ in range(count)]
    readers: list[dict[int, float]] = [{} for _ in range(count)]
    for edge in problem.dependencies:
        lag = max(edge.lag, sources[edge.after].get(edge.before, 0.0))
        sources[edge.after][edge.before] = readers[edge.before][edge.after] = lag
    order = tuple(TopologicalSorter({b: sources[b] for b in range(count)}).static_order())
    own = tuple(tuple(b for b in order if d in problem.blocks[b].devices) for d in range(problem.devices))
    return Shop(
        problem,
        own,
        tuple(tuple(s.items()) for s in sources),
        tuple(tuple(r.items()) for r in readers),
        order,
    )


def orders_of(shop: Shop, starts: Starts) -> tuple[tuple[Instruction, ...], ...]:
    """Return the order of each device."""
    blocks = shop.problem.blocks
    return tuple(tuple(blocks[block].at(micro) for block, micro in order) for order in sequences(shop, starts))


def sequences(shop: Shop, starts: Starts) -> list[list[tuple[int, int]]]:
    """Return by device its (block, micro-batch) in the order of their starts; of those at one time, first what ends at
    once. Nothing comes before what it waits for, so no device waits for ever.

    Times alone do not say so much: sums of floats are rounded, and of a block that takes no time, the start can come
    out as less than the end of what it waits for.
    """
    place = {block: i for i, block in enumerate(shop.alone)}
    lasts = [block.duration > 0 for block in shop.problem.blocks]
    count = len(starts[0])

    def entry(block: int, micro: int) -> tuple[float, bool, int, int, int]:
        return starts[block][micro], lasts[block], micro, place[block], block

    unmet = [[len(sources) + (micro > 0) for micro in range(count)] for sources in shop.sources]
    ready = [entry(block, 0) for block in shop.order if not shop.sources[block]]
    heapify(ready)
    orders: list[list[tuple[int, int]]] = [[] for _ in shop.own]
    while ready:
        *_, micro, _, block = heappop(ready)
        for device in shop.problem.blocks[block].devices:
            orders[device].append((block, micro))
        for after, later in ((block, micro + 1), *((reader, micro) for reader, _ in shop.readers[block])):
            if later < count:
                unmet[after][later] -= 1
                if not unmet[after][later]:
                    heappush(ready, entry(after, later))
    return orders


def replay(shop: Shop, orders: Sequence[Sequence[tuple[int, int]]]) -> Starts | None:
    """Start everything as early as these orders of the devices allow; None where they wait for each other for ever."""
    blocks, count = shop.problem.blocks, shop.problem.micro_batches
    starts = [[-1.0] * count for _ in blocks]
    position, free = [0] * len(orders), [0.0] * len(orders)
    unmet = [[len(s)] * count for s in shop.sources]
    ready = [[0.0] * count for _ in blocks]
    left = sum(len(order) for order in orders)
    waiting = list(range(len(orders)))
    while waiting:
        device = waiting.pop()
        if position[device] == len(orders[device]):
            continue
        block, micro = orders[device][position[device]]
        together = blocks[block].devices
        if unmet[block][micro] or any(
            position[m] == len(orders[m]) or orders[m][position[m]] != (block, micro) for m in together
        ):
            continue
        start = max(ready[block][micro], *(free[m] for m in together))
        starts[block][micro] = start
        end = start + blocks[block].duration
        for m in together:
            free[m] = end
            position[m] += 1
        left -= len(together)
        for reader, lag in shop.readers[block]:
            unmet[reader][micro] -= 1
            ready[reader][micro] = max(ready[reader][micro], end + lag)
            if not unmet[reader][micro]:
                waiting.append(blocks[reader].devices[0])
        waiting += together
    return None if left else tuple(map(tuple, starts))


def makespan_of(shop: Shop, starts: Starts) -> float:
    """Return the time at which the last block ends."""
    return max(row[-1] + block.duration for row, block in zip(starts, shop.problem.blocks, strict=True))


def peaks_of(shop: Shop, orders: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, ...]:
    """Return by device the most bytes at any time. They depend on nothing but the order of its blocks."""
    blocks = shop.problem.blocks
    peaks = []
    for order in orders:
        live = most = 0.0
        for block, _ in order:
            live += blocks[block].allocates
            most = max(most, live)
            live -= blocks[block].frees
        peaks.append(most)
    return tuple(peaks)
