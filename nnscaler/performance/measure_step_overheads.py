"""Measure what a step takes beside its operators, and how ranks that share cores crowd each other, by timing steps.

The steps are those of the model on one rank, which tell what a statement takes, and some between ranks, each of which
shows one overhead: the one with which its predicted time is the measured one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from nnscaler.communication.communicated_graph import Compute, computed_again
from nnscaler.compile import WantedPlan, compile_traced, make
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import Programmed, programmed
from nnscaler.planning.cluster.detect_this_machine import available_cores, found_cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.build_machine_profile import crowded
from nnscaler.planning.cost.measured_profile import Profile
from nnscaler.planning.cost.model_protocol import CostModel, Overheads
from nnscaler.planning.cost.profile_cost import TableCost
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.tracing import Traced
from nnscaler.transform.plan import Plan, RecomputeStep
from nnscaler.transform.select_operations import layers_of

# Overheads from measured steps: the costs of running a program, and of sharing cores, beside those of single
# operators.


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A step of a program on one rank that computes alone.

    statements   how many the program runs
    again        how many of them run again in recomputation
    operators    seconds of its operators, measured one by one
    took         seconds of the step
    outside      of these, what is outside of its passes
    """

    statements: int
    again: int
    operators: float
    took: float
    outside: float = 0.0

    @property
    def passes(self) -> float:
        """Seconds of its passes."""
        return max(0.0, self.took - self.outside)


def overheads_of(steps: Sequence[WholeStep], crowded: Mapping[int, float], ranks: int) -> Overheads:
    """Return the overheads that explain these steps.

    `crowded` has the seconds of the first step while so many ranks run it at once, up to `ranks`. Operators one by one
    may be slower than in a step, when something else disturbed them, or faster, since what they read lies in caches:
    the crowding makes up for it.
    """
    plain = [s for s in steps if not s.again]
    step = min(s.outside for s in plain)
    part, statement = part_and_statement([(s.operators, s.statements, s.passes) for s in plain])
    repeated = [
        (s.passes - part * s.operators - (s.statements + s.again) * statement) / s.again for s in steps if s.again
    ]
    again = max(0.0, float(np.mean(repeated))) if repeated else 0.0
    counts = sorted(crowded)
    slower = np.maximum.accumulate([crowded[n] / plain[0].took for n in counts])
    times = [float(v) for v in np.interp(range(1, ranks + 1), counts, slower)]
    last = times[-1]
    return Overheads(statement * last, again * last, step * last, tuple(part * v for v in times))


_APART = 1.2  # how many times more statements some steps have for a second of operators than others


def part_and_statement(runs: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
    """Return how many times longer operators take in a step than one by one, and the seconds of a statement.

    `runs` are (seconds of operators one by one, statements, seconds of the passes) of steps. One step, or several with
    about as many statements for a second of operators, do not tell the two apart: what passes take more is all the
    statements' then.
    """
    operators, statements, passes = (np.array(column, dtype=float) for column in zip(*runs, strict=True))
    density = statements / operators
    part = min(1.0, float((passes / operators).min()))
    if density.max() > _APART * density.min():
        found = np.linalg.lstsq(np.stack([operators / passes, statements / passes], 1), np.ones(len(runs)), rcond=None)
        both = float(found[0][0]), float(found[0][1])
        if both[0] > 0 and both[1] >= 0:
            return both
        if both[1] < 0:
            return float(passes.sum() / operators.sum()), 0.0
    return part, max(0.0, float(((passes - part * operators) / statements).min()))


_LONGEST = 1.0  # seconds of a step, by the analytic model: in longer ones dispatch is lost, and they are not run
_SECONDS = 0.15  # of a turn
_LIMIT = 600.0


class Listener(Protocol):
    """Is told how measuring goes on, and what could not be measured."""

    def progress(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...


@dataclass(frozen=True)
class SavedProgram:
    """A program of the model, saved in `folder`."""

    folder: Path
    program: Programmed

    def predicted(self, cost: CostModel) -> float:
        return self.program.predicted(cost).seconds

    def counts(self) -> tuple[int, int]:
        """Statements of a step of one rank, and those that it repeats."""
        communicated, micro_batches = self.program.communicated, self.program.order.micro_batches
        forward = communicated.stages[0].forward
        repeated = computed_again(communicated.partitioned.graph, forward)
        again = sum(isinstance(forward[i], Compute) for i in repeated)
        return len(forward) * micro_batches, again * micro_batches


Shown = Literal["crowding", "moved", "halved"]  # the overhead that a step between ranks shows


@dataclass(frozen=True)
class SharedStep:
    """A measured step between ranks.

    shows    the overhead that it is fitted by: how so many ranks crowd each other when they communicate, and then what
             ZeRO does beside its collectives, and what a backward in halves takes
    seconds  of the step
    """

    shows: Shown
    ranks: int
    program: SavedProgram
    seconds: float


@dataclass(frozen=True)
class Steps:
    """Measured seconds: of steps of `programs` alone, outside of their passes, and of the first of them in so many
    ranks at once; and of steps between ranks."""

    programs: tuple[SavedProgram, ...] = ()
    alone: tuple[float, ...] = ()
    outside: tuple[float, ...] = ()
    crowded: Mapping[int, float] = field(default_factory=dict)
    shared: tuple[SharedStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Workplace:
    """The place where programs are measured.

    folder   for the programs, which stay there
    server   where ranks come from; None for one rank
    """

    folder: Path
    server: ForkServer | None = None


def time_steps(
    traced: Traced,
    ranks: int,
    micro_batches: int,
    workplace: Workplace,
    listener: Listener,
    within: float = inf,
) -> Steps:
    """Measures on the CPU. Empty, with the reason said, where no step can be run. `within`: seconds after which no
    round of steps begins, but for the first."""
    start = time.perf_counter()
    programs = _programs(traced, micro_batches, workplace.folder, listener)
    if not programs:
        return Steps()
    counts = [n for n in range(2, ranks + 1) if ranks % n == 0]
    between = _between(traced, counts, micro_batches, workplace.folder, listener)
    told = {ranks for shows, ranks, _ in between if shows == "crowding"}
    counts = [1, *(n for n in counts if n not in told)]  # copies of one rank crowd each other where nothing else can
    arguments = {
        "programs": [str(p.folder) for p in programs],
        "counts": counts,
        "shared": [(str(p.folder), ranks) for _, ranks, p in between],
        "seconds": _SECONDS,
        "within": within - (time.perf_counter() - start),
    }
    job = JobSpecification("nnscaler.runtime.jobs.measure_on_ranks:time_crowded", ranks, arguments)
    outcome = launch(job, timeout=_LIMIT, server=workplace.server)
    if not outcome.ok:
        listener.warning(f"steps were not measured: {outcome.describe()}")
        return Steps()
    alone, outside, slowest, shared = outcome.results()[0]
    number = len(programs) + len(between)
    listener.progress(f"steps        {time.perf_counter() - start:5.1f} s  of {number} programs, up to {ranks} ranks")
    found = (SharedStep(*one, seconds) for one, seconds in zip(between, shared, strict=True))
    return Steps(tuple(programs), tuple(alone), tuple(outside), dict(zip(counts, slowest, strict=True)), tuple(found))


def with_overheads(profile: Profile, steps: Steps, ranks: int, hidden: tuple[float, ...]) -> Profile:
    """The profile of operators that ran alone, as it is between ranks that share this machine's cores. Without measured
    steps they are taken to share them fairly. `hidden`: see `Overheads`."""
    if not steps.programs:
        fair = tuple(max(1.0, n / available_cores()) for n in range(1, ranks + 1))
        return crowded(profile, Overheads(crowding=fair, hidden=hidden))
    cost = TableCost(profile)
    whole = [
        WholeStep(*p.counts(), p.predicted(cost), took, outside)
        for p, took, outside in zip(steps.programs, steps.alone, steps.outside, strict=True)
    ]
    taken = dict(steps.crowded)
    for step in steps.shared:  # in the order of their ranks
        if step.shows == "crowding":
            taken[step.ranks] = _crowd_of(step, profile, whole, taken, hidden)
    overheads = replace(overheads_of(whole, taken, ranks), hidden=hidden)
    for step in steps.shared:
        if step.shows != "crowding":
            overheads = _shown_by(step, profile, overheads)
    return crowded(profile, overheads)


def _crowd_of(
    step: SharedStep,
    profile: Profile,
    whole: Sequence[WholeStep],
    taken: Mapping[int, float],
    hidden: tuple[float, ...],
) -> float:
    """Return what the first whole step would take in so many ranks at once, where a step between them takes what it
    does."""

    def predicted(seconds: float) -> float:
        overheads = overheads_of(whole, {**taken, step.ranks: seconds}, step.ranks)
        return step.program.predicted(TableCost(crowded(profile, replace(overheads, hidden=hidden))))

    least = max(taken.values())  # among fewer
    return max(_where(predicted, step.seconds, least, 2 * least), least)


def _shown_by(step: SharedStep, profile: Profile, overheads: Overheads) -> Overheads:
    """Return overheads with which a step between ranks takes what it does."""
    least, more = (0.0, 1e-4) if step.shows == "moved" else (1.0, 1.25)

    def with_value(value: float) -> Overheads:
        return replace(overheads, moved=value) if step.shows == "moved" else replace(overheads, halved=value)

    def predicted(value: float) -> float:
        return step.program.predicted(TableCost(crowded(profile, with_value(value))))

    return with_value(max(_where(predicted, step.seconds, least, more), least))


def _where(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a function that is all but a line has a value, by two steps of regula falsi; `low` where it does
    not rise."""
    first = function(low)
    found = high
    for _ in range(2):
        slope = (function(found) - first) / (found - low) if found != low else 0.0
        if slope <= 0.0:
            return low
        found = low + (wanted - first) / slope
    return found


def _programs(traced: Traced, micro_batches: int, folder: Path, listener: Listener) -> list[SavedProgram]:
    """With one micro-batch, with as many as asked for, where the batch can be cut so, and with recomputed layers."""
    cost = AnalyticCost(found_cluster(1))
    again = tuple(RecomputeStep(layer.operations) for layer in layers_of(traced.graph))
    wanted = [(1, ()), *([(micro_batches, ())] if micro_batches > 1 else []), *([(1, again)] if again else [])]
    found: list[SavedProgram] = []
    for number, (count, steps) in enumerate(wanted):
        try:
            one = _saved(traced, Plan((("dp", 1),), steps, count), folder / str(number))
        except NnscalerError as error:
            listener.warning(f"a step of {count} micro-batches was not measured: {error.message}")
            continue
        if one.predicted(cost) > _LONGEST:
            listener.progress("steps        not measured: they take so long that operators say it all")
            return []
        found.append(one)
    return found


def _between(
    traced: Traced, counts: Sequence[int], micro_batches: int, folder: Path, listener: Listener
) -> list[tuple[Shown, int, SavedProgram]]:
    """Return programs of several ranks, with the overhead that each shows: of data parallelism between each number of
    them, of ZeRO-2 between most, and of a pipeline between two whose backwards run in halves."""
    wanted: list[tuple[Shown, WantedPlan]] = [("crowding", WantedPlan(n, f"dp={n}")) for n in counts]
    if counts:
        wanted.append(("moved", WantedPlan(counts[-1], f"dp={counts[-1]},zero=2")))
    if 2 in counts and micro_batches > 1:
        wanted.append(("halved", WantedPlan(2, "pp=2", "zb-h1", micro_batches)))
    found: list[tuple[Shown, int, SavedProgram]] = []
    for number, (shows, plan) in enumerate(wanted):
        try:
            saved = _saved(traced, make(traced.graph, plan).plan, folder / f"shared{number}")
        except NnscalerError as error:
            listener.progress(f"steps        none of {plan.plan}: {error.message}")
            continue
        found.append((shows, plan.ranks, saved))
    return found


def _saved(traced: Traced, plan: Plan, folder: Path) -> SavedProgram:
    compile_traced(traced, WantedPlan(plan.ranks, plan, micro_batches=None), model={"name": "profiled"}).save(folder)
    return SavedProgram(folder, programmed(traced.graph, signatures(traced.graph), plan))
