"""Search all states of a step (A*) for the best schedule of a small problem, and for a bound of a larger one.

Since the micro-batches are alike and pass each block in order, a step's state is how often each block has started, and
how long those that run still need. There are few states where memory is tight or devices run blocks together, which is
where rules fail. The search takes the states in the order of the least makespan that they may still lead to (Hart,
Nilsson and Raphael 1968): the first complete one is optimal, and until then what it is at is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from nnscaler.scheduling.search.job_shop_graph import Shop, Starts
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK, holdings, usable_limit

NEVER = 1 << 60


class StepState(NamedTuple):
    """A moment of a step at which something ends or arrives.

    counts    by block: how often it has started
    running   (block, time until it ends), by block
    coming    (time until it arrives, block that waits, block that sent it), of messages under way, the earliest first
    """

    counts: tuple[int, ...]
    running: tuple[tuple[int, int], ...]
    coming: tuple[tuple[int, int, int], ...]


_Reached = dict[StepState, tuple[int, StepState, tuple[int, ...]]]  # when, from which state, by starting what


@dataclass(frozen=True, slots=True)
class StateSearch:
    """The result.

    bound      no schedule is shorter
    starts     the best schedule, if it is better than what the search began with
    complete   whether all was searched: `starts`, or what it began with, is optimal
    states     number of states taken up
    """

    bound: float
    starts: Starts | None
    complete: bool
    states: int


def search_states(shop: Shop, known: float, limit: int) -> StateSearch:
    """Search a shop whose times are whole numbers for a schedule shorter than `known`, in at most `limit` states."""
    space = _Space(shop)
    first = StepState((0,) * len(shop.order), (), ())
    goal = (shop.problem.micro_batches,) * len(shop.order)
    reached: _Reached = {first: (0, first, ())}
    least = space.least(first)
    heap = [(least, 0, first)]
    taken = 0
    while heap:
        least, early, state = heappop(heap)
        now = -early
        if least >= known * (1 - SLACK):
            break
        if reached[state][0] < now:
            continue
        if state.counts == goal:  # the last ones still run: `least` says how long
            return StateSearch(least, _starts(shop, state, reached), True, taken)
        if taken == limit:
            return StateSearch(least, None, False, taken)
        taken += 1
        for time, following, started in space.successors(state):
            at = now + time
            earlier = reached.get(following)
            if earlier is not None and earlier[0] <= at:
                continue
            whole = max(least, at + space.least(following))
            if whole < min(known * (1 - SLACK), NEVER):
                reached[following] = (at, state, started)
                heappush(heap, (whole, -at, following))
    return StateSearch(known, None, True, taken)


def _starts(shop: Shop, state: StepState, reached: _Reached) -> Starts:
    """Follow the states back and return when everything started."""
    starts: list[list[float]] = [[] for _ in shop.order]
    while any(state.counts):
        _, before, started = reached[state]
        for block in started:
            starts[block].append(reached[before][0])
        state = before
    return tuple(tuple(reversed(row)) for row in starts)


class _Space:
    """The states of a problem: what follows a state, and how long it takes at least from there."""

    def __init__(self, shop: Shop) -> None:
        blocks = shop.problem.blocks
        self.shop, self.blocks = shop, blocks
        self.count = shop.problem.micro_batches
        self.duration = [int(b.duration) for b in blocks]
        self.tails = [int(t) for t in shop.tails]
        self.devices = [sum(1 << d for d in block.devices) for block in blocks]
        self.sources = [[(s, int(lag)) for s, lag in sources] for sources in shop.sources]
        self.lagged = [[(r, int(lag)) for r, lag in readers if lag] for readers in shop.readers]
        self.loads = [[(b, self.duration[b], self.tails[b]) for b in own] for own in shop.own if own]
        limited = [d for d in range(shop.problem.devices) if shop.problem.limits[d] < inf]
        # by device with a limit: the limit, and (block, bytes taken, bytes given) of its blocks
        self.memory = [
            (shop.problem.limits[d] * (1 + SLACK), [(b, blocks[b].allocates, blocks[b].frees) for b in shop.own[d]])
            for d in limited
        ]
        self.guards = [[limited.index(d) for d in b.devices if d in limited and b.allocates] for b in blocks]
        self.holdings = [(usable_limit(shop, d), holdings(shop, d)) for d in limited]
        self.takes = [b.allocates for b in blocks]
        takers = [sum(1 for _, taken, _ in changes if taken) for _, changes in self.memory]
        self.movable = [all(takers[guard] == 1 for guard in guards) for guards in self.guards]

    def least(self, state: StepState) -> int:
        """Return the least time in which a step can be finished from a state: by paths, work and memory."""
        left = dict(state.running)
        best, ready = self._paths(state, left)
        counts, count = state.counts, self.count
        for own in self.loads:
            work, head, tail = 0, NEVER, NEVER
            for block, time, after in own:
                times = count - counts[block]
                if times:
                    work += times * time
                    if ready[block] < head:
                        head = ready[block]
                    if after < tail:
                        tail = after
            if work and head + work + tail > best:
                best = head + work + tail
        for usable, pairs in self.holdings:
            whole = self._least_by_memory(counts, left, usable, pairs, ready)
            if whole > best:
                best = whole
        return best

    def _paths(self, state: StepState, left: dict[int, int]) -> tuple[int, list[int]]:
        """Return the longest path to the end of the step, and by block when its next micro-batch can start."""
        counts, running, coming = state
        count, duration, tails = self.count, self.duration, self.tails
        free = [0] * len(self.shop.own)
        best = 0
        for block, time in running:
            if time + tails[block] > best:
                best = time + tails[block]
            for device in self.blocks[block].devices:
                free[device] = time
        ready = [0] * len(counts)
        for block in self.shop.order:
            number = counts[block]
            if number == count:
                continue
            start = 0
            for device in self.blocks[block].devices:
                if free[device] > start:
                    start = free[device]
            for source, lag in self.sources[block]:
                ahead = counts[source] - number
                if ahead == 0:
                    here = ready[source] + duration[source] + lag
                elif ahead == 1 and source in left:
                    here = left[source] + lag
                else:
                    here = self._arrival(state, source, block) if coming else 0
                if here > start:
                    start = here
            ready[block] = start
            whole = start + (count - number) * duration[block] + tails[block]
            if whole > best:
                best = whole
        return best, ready

    def _least_by_memory(
        self,
        counts: tuple[int, ...],
        left: dict[int, int],
        usable: float,
        pairs: list[tuple[int, int, float, float]],
        ready: list[int],
    ) -> int:
        """Return the least time in which a device can hold what it still must, and what comes after."""
        held, tail = 0.0, NEVER
        for taker, giver, amount, span in pairs:
            waiting = counts[taker] - counts[giver]
            time = self.duration[giver]
            each = (self.count - counts[taker]) * span + waiting * ready[giver] + time * waiting * (waiting + 1) // 2
            held += amount * (each + left.get(giver, 0))
            if counts[giver] < self.count or giver in left:
                tail = min(tail, self.tails[giver])
        if not held:
            return 0
        return ceil(held / usable - 1e-6) + tail if usable else NEVER

    def _arrival(self, state: StepState, source: int, block: int) -> int:
        """Return when the message that a block needs next arrives."""
        under_way = [time for time, r, s in state.coming if (r, s) == (block, source)]
        here = state.counts[source] - (source in dict(state.running)) - len(under_way)
        return under_way[0] if under_way and here == state.counts[block] else 0

    def _startable(self, state: StepState) -> list[int]:
        """Return the blocks that may start."""
        counts, running, coming = state
        busy = 0
        for block, _ in running:
            busy |= self.devices[block]
        active = {block for block, _ in running}
        live: dict[int, float] = {}
        found = []
        for block in self.shop.order:
            number = counts[block]
            if number == self.count or self.devices[block] & busy:
                continue
            for source, lag in self.sources[block]:
                here = counts[source] - (source in active)
                if lag and coming:
                    here -= sum(1 for _, r, s in coming if (r, s) == (block, source))
                if here <= number:
                    break
            else:
                if all(self._fits(state, active, guard, block, live) for guard in self.guards[block]):
                    found.append(block)
        return found

    def _fits(self, state: StepState, active: set[int], guard: int, block: int, live: dict[int, float]) -> bool:
        """Return whether a device has the bytes of a block. `live`: what is known of devices, which this adds to."""
        limit, changes = self.memory[guard]
        if guard not in live:
            counts = state.counts
            live[guard] = sum(taken * counts[b] - given * (counts[b] - (b in active)) for b, taken, given in changes)
        return live[guard] + self.takes[block] <= limit

    def successors(self, state: StepState) -> Iterator[tuple[int, StepState, tuple[int, ...]]]:
        """Yield the time to the next event, the state then, and the blocks that start now, for every choice of them.

        A choice is left out if a block could run in the idle time before the next event and nothing is lost by it: it
        takes no memory, or it alone takes memory on its devices, so that no other one could take it in between.
        """
        _, running, coming = state
        startable = self._startable(state)
        soonest = min([time for _, time in running], default=NEVER)
        if coming:
            soonest = min(soonest, coming[0][0])
        choices: list[tuple[tuple[int, ...], int, int]] = [((), 0, soonest)]
        for block in startable:
            devices, time = self.devices[block], self.duration[block]
            choices += [
                ((*chosen, block), used | devices, min(until, time))
                for chosen, used, until in choices
                if not used & devices
            ]
        moved = [(self.devices[b], self.duration[b]) for b in startable if self.movable[b]]
        for chosen, used, until in choices:
            for devices, time in moved:
                if time <= until and not used & devices:
                    break
            else:
                if until < NEVER:
                    yield until, self._advance(state, chosen, until), chosen

    def _advance(self, state: StepState, chosen: tuple[int, ...], until: int) -> StepState:
        """Start blocks and go on to the next event."""
        counts, running, coming = state
        active = list(running)
        if chosen:
            following = list(counts)
            for block in chosen:
                following[block] += 1
                active.append((block, self.duration[block]))
            counts = tuple(following)
            active.sort()
        sent = [(lag, r, block) for block, time in active if time == until for r, lag in self.lagged[block]]
        if coming or sent:
            coming = tuple(sorted([(t - until, r, s) for t, r, s in coming if t > until] + sent))
        return StepState(counts, tuple([(b, t - until) for b, t in active if t > until]), coming)
