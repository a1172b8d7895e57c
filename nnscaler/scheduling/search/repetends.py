"""Search the steady part of a schedule: every block once in each period (a repetend, Lin et al., Tessel, HPCA 2024).

Block b of micro-batch i starts at `offset[b] + period * (lap[b] + i)`: modulo scheduling (Rau 1994). For a period the
question is an integer program, with one variable for each block and offset. Dependencies are rows as Eichenberger and
Davidson (1997) write them, one for each offset, which makes the relaxation tight. What a device holds at a moment
of the period is linear in the same variables. HiGHS answers; a period that it refutes refutes all shorter ones, because
a schedule of a shorter period can be stretched at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf

import highspy
import numpy as np
from numpy.typing import NDArray

from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, makespan_of, peaks_of, replay, sequences, shop_of
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK, ScheduleBound

SEED = 0


@dataclass(frozen=True, slots=True)
class Repetend:
    """A steady schedule in whole units.

    period   from one micro-batch to the next
    offsets  by block: when in the period it starts
    laps     by block: how many periods after its micro-batch began
    """

    period: int
    offsets: tuple[int, ...]
    laps: tuple[int, ...]

    def expand(self, count: int) -> Starts:
        """Return the schedule of so many micro-batches: warm-up and cool-down are the periods that are not full.

        It fits into memory if the steady part does: a device holds a part of what it would hold there, pair by pair.
        """
        at = [offset + self.period * lap for offset, lap in zip(self.offsets, self.laps, strict=True)]
        first = min(at)
        return tuple(tuple(start - first + self.period * i for i in range(count)) for start in at)


@dataclass(frozen=True, slots=True)
class RepetendSearch:
    """The result.

    repetend   the best one found, if any
    refuted    no repetend has this period or a shorter one, in whole units; 0: nothing is known
    nodes      of all integer programs
    """

    repetend: Repetend | None
    refuted: int
    nodes: int


def search_repetend(shop: Shop, bound: ScheduleBound, most: int, nodes: int) -> RepetendSearch:
    """Search the shortest period, from the bound upwards, for a shop whose times are whole numbers.

    `most`: the longest period to try; `nodes`: the most nodes of all integer programs together.
    """
    shortest = max(1, ceil(bound.period * (1 - SLACK)), *(int(b.duration) for b in shop.problem.blocks))
    refuted, proved, used = shortest - 1, True, 0
    for period in range(shortest, most + 1):
        if used >= nodes:
            break
        status, values, spent = _solve(shop, period, nodes - used)
        used += max(1, spent)
        if status == highspy.HighsModelStatus.kInfeasible:
            refuted = period if proved else refuted
        elif values is not None:
            return RepetendSearch(_read(values, len(shop.order), period), refuted, used)
        else:
            proved = False
    return RepetendSearch(None, refuted, used)


def _read(values: NDArray[np.float64], count: int, period: int) -> Repetend:
    # [block, offset]: one of each row is set
    chosen = values[: count * period].reshape(count, period).argmax(axis=1)
    laps = np.rint(values[count * period :]).astype(int)
    return Repetend(period, tuple(chosen.tolist()), tuple(laps.tolist()))


class _Rows:
    """Rows of an integer program as they are written."""

    def __init__(self) -> None:
        self.starts = [0]
        self.columns: list[int] = []
        self.values: list[float] = []
        self.upper: list[float] = []
        self.lower: list[float] = []

    def add(self, entries: dict[int, float], upper: float, lower: float = -inf) -> None:
        """Append a row."""
        self.columns += entries
        self.values += entries.values()
        self.starts.append(len(self.columns))
        self.upper.append(upper)
        self.lower.append(lower)


def _solve(shop: Shop, period: int, nodes: int) -> tuple[highspy.HighsModelStatus, NDArray[np.float64] | None, int]:
    """Return how the integer program of a period ended, its solution if it has one, and its nodes."""
    count = len(shop.order)
    columns = count * period + count  # by block and offset: starts there; by block: laps
    rows = _Rows()
    for block in range(count):
        rows.add({block * period + t: 1.0 for t in range(period)}, 1.0, 1.0)
    _add_devices(rows, shop, period)
    for block, sources in enumerate(shop.sources):
        for source, lag in sources:
            _add_dependency(rows, shop, period, (source, block), int(lag))
    for device in range(shop.problem.devices):
        if shop.problem.limits[device] < inf:
            _add_memory(rows, shop, period, device)
    upper = np.ones(columns)
    upper[count * period :] = _most_laps(shop, period)
    first = next(b for b in shop.order if not shop.sources[b])
    upper[first * period + 1 : (first + 1) * period] = 0.0  # turning the period changes nothing
    cost = np.zeros(columns)
    cost[count * period :] = 1.0
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(rows.upper)
    model.col_cost_, model.col_lower_, model.col_upper_ = cost, np.zeros(columns), upper
    model.row_lower_, model.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(rows.starts, np.int32)
    model.a_matrix_.index_ = np.array(rows.columns, np.int32)
    model.a_matrix_.value_ = np.array(rows.values)
    model.integrality_ = [highspy.HighsVarType.kInteger] * columns
    solver = highspy.Highs()
    for option, setting in (("output_flag", False), ("threads", 1), ("random_seed", SEED), ("mip_max_nodes", nodes)):
        solver.setOptionValue(option, setting)
    solver.passModel(model)
    solver.run()
    information = solver.getInfo()
    values = np.array(solver.getSolution().col_value)
    found = len(values) == columns and information.objective_function_value < 1e20
    return solver.getModelStatus(), values if found else None, max(0, int(information.mip_node_count))


def _add_devices(rows: _Rows, shop: Shop, period: int) -> None:
    """At every moment of the period a device serves one block."""
    for own in shop.own:
        for moment in range(period):
            entries: dict[int, float] = {}
            for block in own:
                for past in range(int(shop.problem.blocks[block].duration)):
                    entries[block * period + (moment - past) % period] = 1.0
            rows.add(entries, 1.0)


def _add_dependency(rows: _Rows, shop: Shop, period: int, pair: tuple[int, int], lag: int) -> None:
    """One row for each offset: if the source starts there or later, the reader does not start before it has ended, or
    does so a lap later."""
    source, reader = pair
    laps, rest = divmod(int(shop.problem.blocks[source].duration) + lag, period)
    base = len(shop.order) * period
    for moment in range(period):
        entries = {source * period + t: 1.0 for t in range(moment, period)}
        until = moment + rest
        wrapped = until > period
        for t in range(until - period if wrapped else until):
            entries[reader * period + t] = 1.0
        entries[base + reader] = -1.0
        entries[base + source] = 1.0
        rows.add(entries, 1.0 - laps - wrapped)


def _add_memory(rows: _Rows, shop: Shop, period: int, device: int) -> None:
    """At every moment, what has been taken less what has been given back fits.

    The starts of a block up to a moment, over all micro-batches, are those of full laps and one more if its offset has
    come; its ends likewise. What the full laps hold cancels, since a micro-batch gives back what it takes.
    """
    base = len(shop.order) * period
    for moment in range(period):
        entries: dict[int, float] = {}
        for index in shop.own[device]:
            block = shop.problem.blocks[index]
            for t in range(period):
                started = (moment - t) // period + 1
                ended = (moment - t - int(block.duration)) // period + 1
                amount = block.allocates * started - block.frees * ended
                if amount:
                    entries[index * period + t] = amount
            if block.allocates != block.frees:
                entries[base + index] = block.frees - block.allocates
        if entries:
            rows.add(entries, shop.problem.limits[device] * (1 + SLACK))


def _most_laps(shop: Shop, period: int) -> int:
    """Return laps that suffice: where every block waits a lap or more, all that follow can be moved a lap."""
    lags = max((lag for sources in shop.sources for _, lag in sources), default=0)
    return sum(2 + ceil((b.duration + lags) / period) for b in shop.problem.blocks)


# Longer steps from the best schedule of a short one: what happens between two moments is done again and again.
# If at two moments of a step the same blocks are under way, and every block has started equally often in between, then
# what happened there can be repeated: it is a repetend of several micro-batches, with a warm-up and a cool-down that
# fit. The moments need not be quite alike: the order that comes of it is replayed, and left out if it waits for ever or
# does not fit into memory. Where one micro-batch in a period is not the best that can be done, such a repetend beats
# every one of those above.

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
