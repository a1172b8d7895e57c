"""List scheduling by a rule: whenever devices are free, start the most urgent block that may run (Graham 1966).

A block may run when what it waits for has ended, its devices are free, its bytes fit, and every micro-batch that is
under way can still be finished, the oldest first (the banker's algorithm, Dijkstra 1965): so memory never deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, makespan_of, peaks_of, replay, sequences, shop_of
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK

Keys = Sequence[Sequence[float]]  # by block and micro-batch: the less, the more urgent


class MemoryGuard:
    """The memory of one device, held and still free. Changes as blocks start and end."""

    def __init__(self, shop: Shop, device: int) -> None:
        blocks = shop.problem.blocks
        changing = [b for b in shop.own[device] if blocks[b].allocates or blocks[b].frees]
        self.own = [b for b in shop.alone if b in changing]
        self.bit = {b: 1 << i for i, b in enumerate(self.own)}
        self.change = [(blocks[b].allocates, blocks[b].frees) for b in self.own]
        self.limit = shop.problem.limits[device] * (1 + SLACK)
        self.live = 0.0
        self.begun = [0] * shop.problem.micro_batches  # by micro-batch: its blocks that have started, as bits
        self.first, self.last = 0, -1  # of those under way
        self.full = (1 << len(self.own)) - 1
        self._known: dict[int, tuple[float, float]] = {}

    def state(self, begun: int) -> tuple[float, float]:
        """Return what a micro-batch holds after these blocks, and how much more it needs at most to finish."""
        if begun not in self._known:
            held = more = level = 0.0
            for i, (taken, given) in enumerate(self.change):
                if begun >> i & 1:
                    held += taken - given
                else:
                    more = max(more, level + taken)
                    level += taken - given
            self._known[begun] = (held, more)
        return self._known[begun]

    def may_start(self, block: int, micro: int) -> bool:
        """Return whether the block's bytes fit and all that is under way can still finish."""
        bit = self.bit.get(block)
        if bit is None or not self.change[bit.bit_length() - 1][0]:
            return True
        taken = self.change[bit.bit_length() - 1][0]
        if self.live + taken > self.limit:
            return False
        after = self.begun[micro] | bit
        total = self.live + taken - self.change[bit.bit_length() - 1][1]
        if total + self.state(0)[1] <= self.limit:
            return True
        for other in range(self.first, max(self.last, micro) + 1):
            begun = after if other == micro else self.begun[other]
            if begun and begun != self.full:
                held, more = self.state(begun)
                if total + more > self.limit:
                    return False
                total -= held
        return True

    def start(self, block: int, micro: int) -> None:
        """Take the block's bytes."""
        bit = self.bit.get(block)
        if bit is not None:
            self.live += self.change[bit.bit_length() - 1][0]
            self.begun[micro] |= bit
            self.last = max(self.last, micro)

    def end(self, block: int) -> None:
        """Give the block's bytes back."""
        bit = self.bit.get(block)
        if bit is not None:
            self.live -= self.change[bit.bit_length() - 1][1]
            while self.first < len(self.begun) and self.begun[self.first] == self.full:
                self.first += 1


def list_schedule(shop: Shop, keys: Keys, reserve: bool = True) -> Starts | None:
    """Return a schedule by a rule; None where it comes to a halt.

    `reserve`: a block that waits for some of its devices keeps the others from less urgent blocks.
    """
    return _Simulation(shop, keys, reserve).run()


class _Simulation:
    """A step as it runs. Changes from event to event."""

    def __init__(self, shop: Shop, keys: Keys, reserve: bool) -> None:
        self.shop, self.keys, self.reserve = shop, keys, reserve
        self.blocks = shop.problem.blocks
        self.count = shop.problem.micro_batches
        self.guards = [MemoryGuard(shop, device) for device in range(shop.problem.devices)]
        self.next = [0] * len(self.blocks)  # by block: the micro-batch that it runs next
        self.arrived = [dict.fromkeys((s for s, _ in sources), 0) for sources in shop.sources]
        self.candidates = {b for b in shop.order if not shop.sources[b]}
        self.busy = [False] * len(shop.own)
        self.starts: list[list[float]] = [[] for _ in self.blocks]
        self.events: list[tuple[float, int, int]] = []  # time, block, its reader; -1: the block itself ends
        self.now = 0.0

    def run(self) -> Starts | None:
        """Run until nothing can start any more."""
        self._start_all()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now * (1 + SLACK):
                _, block, reader = heappop(self.events)
                if reader < 0:
                    self._end(block)
                else:
                    self._arrive(block, reader)
            self._start_all()
        if any(n < self.count for n in self.next):
            return None
        return tuple(map(tuple, self.starts))

    def _start_all(self) -> None:
        """Start what may start, the most urgent first."""
        busy = self.busy
        held: set[int] = set()
        for block in sorted(self.candidates, key=lambda b: (self.keys[b][self.next[b]], b)):
            devices = self.blocks[block].devices
            blocked = any(busy[m] or m in held for m in devices)
            if blocked and (not self.reserve or len(devices) == 1):
                continue
            micro = self.next[block]
            if not all(self.guards[d].may_start(block, micro) for d in self.blocks[block].devices):
                continue
            if blocked:
                held.update(devices)
                continue
            self._start(block, micro)

    def _start(self, block: int, micro: int) -> None:
        self.starts[block].append(self.now)
        self.next[block] += 1
        for device in self.blocks[block].devices:
            self.busy[device] = True
        for device in self.blocks[block].devices:
            self.guards[device].start(block, micro)
        if not self._ready(block):
            self.candidates.discard(block)
        heappush(self.events, (self.now + self.blocks[block].duration, block, -1))

    def _end(self, block: int) -> None:
        for device in self.blocks[block].devices:
            self.busy[device] = False
        for device in self.blocks[block].devices:
            self.guards[device].end(block)
        for reader, lag in self.shop.readers[block]:
            if lag:
                heappush(self.events, (self.now + lag, block, reader))
            else:
                self._arrive(block, reader)

    def _arrive(self, block: int, reader: int) -> None:
        self.arrived[reader][block] += 1
        if self._ready(reader):
            self.candidates.add(reader)

    def _ready(self, block: int) -> bool:
        micro = self.next[block]
        return micro < self.count and all(n > micro for n in self.arrived[block].values())


# Rules for list scheduling, and their improvement by running a schedule backwards and forwards.
# A schedule of the mirrored problem (time runs backwards, what is taken is given back) is one of the problem.
# Scheduling the mirror in the order of a schedule's ends, and the problem in the order of the starts that result, moves
# everything as late and then as early as it can be (double justification, Valls, Ballestin and Quintanilla 2005). It
# closes nearly all of what a rule leaves open.

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
