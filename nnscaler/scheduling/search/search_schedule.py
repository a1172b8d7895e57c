"""Search a schedule: by rules, then over all states of a small problem, then by repetends, each only if a gap is left.

All limits count work, so that the same problem has the same answer on every machine.

The parts of the search that count have times in whole units. Where all times are multiples of one unit, and not too
many of it, nothing changes. Elsewhere they are rounded down: what is then proved to be impossible is impossible with
the real times too, and an order is replayed with those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, gcd, isfinite, lcm

from nnscaler.scheduling.search.exact_state_search import search_states
from nnscaler.scheduling.search.found_schedule import FoundSchedule, PeriodProof, ScheduleCertificate, violations
from nnscaler.scheduling.search.job_shop_graph import Shop, Starts, orders_of, peaks_of, sequences, shop_of
from nnscaler.scheduling.search.list_scheduling import Portfolio, settled
from nnscaler.scheduling.search.problem import ScheduleProblem
from nnscaler.scheduling.search.repetends import SEED, longer_step, search_repetend
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK, ScheduleBound, bound_of, check_memory

COARSEST = 4  # units in the work of the busiest device: with fewer, times say nothing


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """The most work that a search may do.

    rounds     of justification, for every rule
    states     of the exact search; a quarter of them where times are rounded, or for a short step; 0: none
    nodes      of all integer programs together; 0: no repetends
    variables  of an integer program of the shortest period that may be; times are rounded until they suffice
    units      of time in the work of the busiest device, where times are rounded for the two
    short      micro-batches of the short steps whose best schedules are repeated where a step has more; 0: none
    segments   of a short step to be repeated, of each length
    """

    rounds: int = 2
    states: int = 100_000
    nodes: int = 2_000
    variables: int = 400
    units: int = 50
    short: int = 8
    segments: int = 300


def find_schedule(
    problem: ScheduleProblem, budget: SearchBudget | None = None, *, repetends: bool = False
) -> FoundSchedule:
    """Return the shortest schedule found, with its certificate.

    `repetends`: search them also where the step is proved to be optimal without.

    Raises NnscalerError("schedule_memory") where no schedule fits.
    """
    shop = shop_of(problem)
    check_memory(shop)
    search = _Search(shop, budget or SearchBudget())
    search.by_rules()
    search.by_states()
    search.by_segments()
    search.by_repetends(repetends)
    return search.result()


class _Search:
    """A search under way. Changes as it goes on."""

    def __init__(self, shop: Shop, budget: SearchBudget) -> None:
        self.shop, self.budget = shop, budget
        self.bound: ScheduleBound = bound_of(shop)
        self.portfolio = Portfolio(shop)
        self.units: UnitShop = in_units(shop, budget.units)
        self.repetend: PeriodProof | None = None
        self.searched: list[str] = []
        self.not_searched: list[str] = []

    @property
    def makespan(self) -> float:
        best = self.portfolio.best
        return best.makespan if best is not None else sum(self.shop.loads) * self.shop.problem.micro_batches * 2

    def closed(self) -> bool:
        """Return whether the best schedule is proved to be optimal."""
        return self.portfolio.best is not None and self.makespan <= self.bound.makespan * (1 + SLACK)

    def by_rules(self) -> None:
        self.portfolio.run(self.bound.makespan, self.budget.rounds)
        if self.portfolio.best is None:
            place = {block: i for i, block in enumerate(self.shop.alone)}
            micros = range(self.shop.problem.micro_batches)
            turns = tuple(tuple(float(i * len(place) + place[b]) for i in micros) for b in range(len(place)))
            self._offer(turns, "one micro-batch after another")
        self.searched.append(f"rules and their justification: {self.portfolio.passes} passes")

    def by_states(self) -> None:
        """Search all schedules of the step."""
        if self.closed():
            return
        if not self.budget.states:
            self.not_searched.append("all schedules: no states allowed")
            return
        known = self.makespan / self.units.unit
        # with rounded times a schedule that looks as good as the known one may be better or worse: find it
        exact = self.units.exact
        limit = self.budget.states if exact else self.budget.states // 4  # what rounding hides, no search finds
        found = search_states(self.units.shop, known if exact else known * (1 + 1e-6), limit)
        proved = found.bound * self.units.unit
        rounded = "" if self.units.exact else ", times rounded down"
        self.searched.append(
            f"all schedules: {found.states} states{'' if found.complete else ', not finished'}{rounded}"
        )
        if not found.complete:
            self.not_searched.append(f"all schedules beyond {limit} states")
        if found.starts is not None:
            self._offer(found.starts, "search of all schedules")
        if proved > self.bound.makespan * (1 + SLACK):
            self.bound = replace(self.bound, makespan=proved, reason=f"search of all schedules{rounded}")

    def by_segments(self) -> None:
        """Repeat a part of the best schedule of a short step."""
        count, short = self.shop.problem.micro_batches, self.budget.short
        if self.closed() or not short or count <= short or not self.budget.states:
            return
        unit = self.units.shop
        for few in (short, short - 1):  # one of them leaves an even number
            small = shop_of(replace(unit.problem, micro_batches=few))
            rules = Portfolio(small)
            rules.run(bound_of(small).makespan, self.budget.rounds)
            assert rules.best is not None, "one micro-batch fits"
            found = search_states(small, rules.best.makespan * (1 + 1e-6), self.budget.states // 4)
            ended = "" if found.complete else ", not finished"
            self.searched.append(f"all schedules of {few} micro-batches: {found.states} states{ended}")
            longer = longer_step(unit, found.starts or rules.best.starts, self.budget.segments)
            if longer is not None:
                self._offer(longer[0], f"a repeated segment of {longer[1]} micro-batches")

    def by_repetends(self, always: bool) -> None:
        """Search the shortest period, and fill a step with it."""
        if self.closed() and not always:
            return
        moments = self.budget.variables // len(self.shop.order)
        if not self.budget.nodes or moments < COARSEST:
            many = f"{len(self.shop.order)} blocks are too many for the variables of an integer program"
            self.not_searched.append(f"repetends: {many if self.budget.nodes else 'no nodes allowed'}")
            return
        self.units = in_units(self.shop, min(self.budget.units, moments))
        bound = bound_of(self.units.shop)
        most = int(sum(b.duration for b in self.units.shop.problem.blocks)) + len(self.shop.order)
        found = search_repetend(self.units.shop, bound, most, self.budget.nodes)
        rounded = "" if self.units.exact else ", times rounded down"
        self.searched.append(f"repetends of one micro-batch, in whole units: {found.nodes} nodes{rounded}")
        if found.repetend is None:
            self.not_searched.append("repetends: no integer program was solved within its nodes")
            return
        unit = self.units.unit
        self.repetend = PeriodProof(found.repetend.period * unit, found.refuted * unit, unit)
        if not self.closed():
            starts = found.repetend.expand(self.shop.problem.micro_batches)
            self._offer(starts, f"a repetend with period {found.repetend.period * unit:g}")

    def _offer(self, starts: Starts, source: str) -> None:
        """Take a schedule in units: with the real times, and justified."""
        real = settled(self.shop, starts) if self.units.exact else self._in_order(starts)
        self.portfolio.take(real, source)
        if not self.closed():
            self.portfolio.justify(real, source, self.bound.makespan, 2)

    def _in_order(self, starts: Starts) -> Starts:
        scaled = tuple(tuple(start * self.units.unit for start in row) for row in starts)
        return settled(self.shop, scaled)

    def result(self) -> FoundSchedule:
        """Return the best schedule."""
        from importlib.metadata import version  # it reads mail headers: short commands need none

        best = self.portfolio.best
        problem = self.shop.problem
        assert best is not None, "one micro-batch after another fits"
        orders = orders_of(self.shop, best.starts)
        wrong = violations(problem, best.starts, orders)
        assert not wrong, wrong
        bound = min(self.bound.makespan, best.makespan)
        certificate = ScheduleCertificate(
            makespan=best.makespan,
            bound=bound,
            gap=(best.makespan - bound) / best.makespan if best.makespan and not self.closed() else 0.0,
            proof=self.bound.reason,
            source=best.source,
            period_bound=self.bound.period,
            repetend=self.repetend,
            peaks=peaks_of(self.shop, sequences(self.shop, best.starts)),
            limits=tuple(limit if isfinite(limit) else None for limit in problem.limits),
            searched=tuple(self.searched),
            not_searched=tuple(self.not_searched),
            solver=f"highspy {version('highspy')}" if self.repetend is not None else "",
            seed=SEED,
        )
        return FoundSchedule(problem, best.starts, orders, certificate)


FINEST = 10**6  # parts of a time unit that are told apart


@dataclass(frozen=True, slots=True)
class UnitShop:
    """A shop in whole units.

    shop    with whole numbers as times
    unit    of them, in the times of the problem
    exact   whether nothing was rounded
    """

    shop: Shop
    unit: float
    exact: bool


def in_units(shop: Shop, most: int) -> UnitShop:
    """Return the shop in whole units, at most `most` of them in the work of the busiest device."""
    problem = shop.problem
    times = [b.duration for b in problem.blocks] + [d.lag for d in problem.dependencies]
    load = max(shop.loads)
    unit = _common_unit([t for t in times if t])
    exact = unit is not None and load <= unit * most * (1 + SLACK)
    chosen = float(unit) if exact and unit is not None else load / most if load else 1.0

    def whole(time: float) -> int:
        return round(time / chosen) if exact else floor(time / chosen + SLACK)

    blocks = tuple(replace(b, duration=whole(b.duration)) for b in problem.blocks)
    edges = tuple(replace(d, lag=whole(d.lag)) for d in problem.dependencies)
    scaled = ScheduleProblem(blocks, edges, problem.limits, problem.micro_batches)
    return UnitShop(shop_of(scaled), chosen, exact)


def _common_unit(times: list[float]) -> Fraction | None:
    """Return the largest time of which all are multiples; None where there is none worth it."""
    parts = [Fraction(t).limit_denominator(FINEST) for t in times]
    if not parts or any(abs(float(p) - t) > SLACK * t for p, t in zip(parts, times, strict=True)):
        return None
    below = lcm(*(p.denominator for p in parts))
    return Fraction(gcd(*(int(p * below) for p in parts)), below)
