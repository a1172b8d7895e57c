"""Longer steps from the best schedule of a short one: what happens between two moments is done again and again.

If at two moments of a step the same blocks are under way, and every block has started equally often in between, then
what happened there can be repeated: it is a repetend of several micro-batches, with a warm-up and a cool-down that fit.
The moments need not be quite alike: the order that comes of it is replayed, and left out if it waits for ever or does
not fit into memory. Where one micro-batch in a period is not the best that can be done, such a repetend beats every one
of `modulo_scheduling.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nnscaler.scheduling.search.bound import SLACK
from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, makespan_of, peaks_of, replay, sequences, shop_of

LONGEST = 4  # micro-batches in a segment
TRIED = 4  # times that every segment is repeated
KEPT = 5  # segments that are repeated as often as the step asks for


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a schedule that may be repeated.

    count    micro-batches in it
    length   of it, in the times of the shop
    first    by block: the micro-batch that it runs first in it
    """

    count: int
    length: float
    first: tuple[int, ...]

    def repeat(self, starts: Starts, times: int) -> Starts:
        """Return the times with the segment repeated so many times more."""
        longer = []
        for row, first in zip(starts, self.first, strict=True):
            again = [start + self.length * i for i in range(times + 1) for start in row[first : first + self.count]]
            rest = [start + self.length * times for start in row[first + self.count :]]
            longer.append((*row[:first], *again, *rest))
        return tuple(longer)


def segments_of(starts: Starts, count: int) -> Iterator[Segment]:
    """Yield the segments of so many micro-batches: from every moment, with every length that some block suggests."""
    seen = set()
    for now in sorted({start for row in starts for start in row}):
        first = tuple(sum(1 for start in row if start < now) for row in starts)
        if max(first) + count >= len(starts[0]):
            return
        lengths = {row[i + count] - row[i] for row, i in zip(starts, first, strict=True)}
        for length in sorted(lengths):
            if length and (length, first) not in seen:
                seen.add((length, first))
                yield Segment(count, length, first)


def longer_step(shop: Shop, starts: Starts, tries: int) -> tuple[Starts, int] | None:
    """Return the best schedule for the shop that repeats a segment of a shorter step's schedule, and the segment's
    micro-batches; None if there is none.

    At most `tries` segments of each number of micro-batches are repeated a few times; the best of those, as often as
    the step asks for.
    """
    few = len(starts[0])
    more = shop.problem.micro_batches - few
    promising: list[tuple[float, Segment]] = []
    for count in range(1, LONGEST + 1):
        if more % count:
            continue
        times = min(TRIED, more // count)
        trial = shop_of(replace(shop.problem, micro_batches=few + times * count))
        for _, segment in zip(range(tries), segments_of(starts, count), strict=False):
            found = _repeated(trial, starts, segment, times)
            if found is not None:
                each = (makespan_of(trial, found) - makespan_of(trial, starts)) / (times * count)
                promising.append((each, segment))
    best: tuple[float, int, Starts] | None = None
    for _, segment in sorted(promising, key=lambda p: (p[0], p[1].count))[:KEPT]:
        found = _repeated(shop, starts, segment, more // segment.count)
        if found is not None and (best is None or makespan_of(shop, found) < best[0] * (1 - SLACK)):
            best = (makespan_of(shop, found), segment.count, found)
    return best and (best[2], best[1])


def _repeated(shop: Shop, starts: Starts, segment: Segment, times: int) -> Starts | None:
    """Return the schedule with a segment repeated; None where its order waits for ever or does not fit."""
    orders = sequences(shop, segment.repeat(starts, times))
    limits = zip(peaks_of(shop, orders), shop.problem.limits, strict=False)
    if any(peak > limit * (1 + SLACK) for peak, limit in limits):
        return None
    return replay(shop, orders)
