"""Longer steps from the best schedule of a short one: what happens between two equal states can be repeated.

Two moments of a step are alike if between them every block has started equally often and at both the same blocks are
under way for as long. What happened between them can happen again, any number of times: it is a repetend of several
micro-batches, and what is before and after it is a warm-up and a cool-down that fit. Where one micro-batch a period is
not the best that can be done, such a repetend beats every one of `repetend.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nnscaler.scheduling.search.shop import Shop, Starts


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a schedule that can be repeated.

    count    micro-batches in it
    length   of it, in the times of the shop
    first    by block: the micro-batch that it runs first in it
    """

    count: int
    length: float
    first: tuple[int, ...]

    @property
    def period(self) -> float:
        return self.length / self.count

    def repeat(self, starts: Starts, times: int) -> Starts:
        """Return the schedule with the segment repeated so many times more."""
        longer = []
        for row, first in zip(starts, self.first, strict=True):
            again = [start + self.length * i for i in range(times + 1) for start in row[first : first + self.count]]
            rest = [start + self.length * times for start in row[first + self.count :]]
            longer.append((*row[:first], *again, *rest))
        return tuple(longer)


def segments_of(shop: Shop, starts: Starts) -> list[Segment]:
    """Return the segments of a schedule, the shortest period first, of each number of micro-batches the best one."""
    seen: dict[tuple[object, ...], list[tuple[float, tuple[int, ...]]]] = {}
    best: dict[int, Segment] = {}
    for now in sorted({start for row in starts for start in row}):
        counts, state = _moment(shop, starts, now)
        for before, started in seen.setdefault(state, []):
            count = counts[0] - started[0]
            if count and (count not in best or now - before < best[count].length):
                best[count] = Segment(count, now - before, started)
        seen[state].append((now, counts))
    return sorted(best.values(), key=lambda s: (s.period, s.count))


def _moment(shop: Shop, starts: Starts, now: float) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """Return how often each block has started before a moment, and what is under way then."""
    counts = tuple(sum(1 for start in row if start < now) for row in starts)
    under_way = []
    for index, (block, row) in enumerate(zip(shop.problem.blocks, starts, strict=True)):
        longest = block.duration + max((lag for _, lag in shop.readers[index]), default=0)
        under_way += [(index, start - now) for start in row[: counts[index]] if start + longest > now]
    return counts, (tuple(count - counts[0] for count in counts), tuple(under_way))
