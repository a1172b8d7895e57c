"""Longer steps from the best schedule of a short one: what happens between two moments is done again and again.

If at two moments of a step the same blocks are under way, and every block has started equally often in between, then
what happened there can be repeated: it is a repetend of several micro-batches, with a warm-up and a cool-down that fit.
The moments need not be quite alike: the order that comes of it is replayed, and left out if it waits for ever or does
not fit into memory. Where one micro-batch in a period is not the best that can be done, such a repetend beats every one
of `repetend.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nnscaler.scheduling.search.bound import SLACK
from nnscaler.scheduling.search.shop import Shop, Starts, makespan_of, peaks_of, replay, sequences

LONGEST = 4  # micro-batches in a segment


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
    micro-batches; None if there is none. At most `tries` segments of each number of micro-batches are tried."""
    more = shop.problem.micro_batches - len(starts[0])
    best: tuple[float, int, Starts] | None = None
    for count in range(1, LONGEST + 1):
        if more % count:
            continue
        for _, segment in zip(range(tries), segments_of(starts, count), strict=False):
            orders = sequences(shop, segment.repeat(starts, more // count))
            limits = zip(peaks_of(shop, orders), shop.limits, strict=False)
            if any(peak > limit * (1 + SLACK) for peak, limit in limits):
                continue
            found = replay(shop, orders)
            if found is not None and (best is None or makespan_of(shop, found) < best[0] * (1 - SLACK)):
                best = (makespan_of(shop, found), count, found)
    return best and (best[2], best[1])
