"""The result of a search: a schedule with its certificate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite

from nnscaler.instructions import Instruction
from nnscaler.records_as_json import encode
from nnscaler.scheduling.dependencies import check_acyclic
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.search.job_shop_graph import Starts
from nnscaler.scheduling.search.problem import ScheduleProblem


@dataclass(frozen=True, slots=True)
class PeriodProof:
    """The shortest repetend found, and a refutation of shorter ones: each block once in a period, in whole units.

    period     unit of the durations: of the shortest one found
    refuted    unit of the durations: no repetend has this period or a shorter one, in whole units
    unit       the unit, in that of the durations
    """

    period: float
    refuted: float
    unit: float


@dataclass(frozen=True, slots=True)
class ScheduleCertificate:
    """The proof of a schedule, and what was tried.

    makespan       unit of the durations: of the step
    bound          unit of the durations: no schedule of the problem is shorter
    gap            (makespan - bound) / makespan; 0: the schedule is optimal
    proof          what proves the bound
    source         what found the schedule
    period_bound   unit of the durations: no steady schedule, of any form, has less time between micro-batches
    repetend       what is known of repetends; None: they were not searched
    peaks          by device: the most bytes at any time
    limits         by device: the most that there may be; None: no limit
    searched       what was tried, in that order, with the work that it took
    not_searched   what was left out, with the reason
    solver         of the integer programs; empty: none was solved
    seed           of the solver; nothing else draws by chance
    """

    makespan: float
    bound: float
    gap: float
    proof: str
    source: str
    period_bound: float
    repetend: PeriodProof | None
    peaks: tuple[float, ...]
    limits: tuple[float | None, ...]
    searched: tuple[str, ...]
    not_searched: tuple[str, ...]
    solver: str
    seed: int

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(encode(self), indent=2)


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """A schedule of a problem.

    problem       what was asked
    starts        by block and micro-batch: when it starts
    orders        by device: its instructions
    certificate   what is proved of it
    """

    problem: ScheduleProblem
    starts: Starts
    orders: tuple[tuple[Instruction, ...], ...]
    certificate: ScheduleCertificate

    def schedule(self, name: str = "search") -> Schedule:
        """Return it as a schedule of the compiler, checked for completeness and deadlocks."""
        blocks = self.problem.blocks
        devices = {block.stage: block.devices for block in blocks}
        stages = tuple(devices[stage] for stage in sorted(devices))
        trained = {block.stage for block in blocks if block.kind != "F"}
        untrained = frozenset(stage for stage in devices if stage not in trained)
        schedule = Schedule(name, stages, self.problem.micro_batches, self.orders, untrained)
        forward = [(blocks[e.before], blocks[e.after]) for e in self.problem.dependencies]
        check_acyclic(schedule, {(a.stage, b.stage) for a, b in forward if a.kind == b.kind == "F"})
        return schedule


def limits_of(problem: ScheduleProblem) -> tuple[float | None, ...]:
    """Return the limits as the certificate has them."""
    return tuple(limit if isfinite(limit) else None for limit in problem.limits)
