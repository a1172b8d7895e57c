"""The result of a search: a schedule with its certificate."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nnscaler.instructions import Instruction, Kind, total_order
from nnscaler.records_as_json import encode
from nnscaler.scheduling.dependencies import check_acyclic
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.search.job_shop_graph import Starts
from nnscaler.scheduling.search.problem import ScheduleProblem
from nnscaler.scheduling.search.schedule_lower_bounds import SLACK


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


# Check a schedule against its problem: from the times and the orders alone, not from how they were found.


def violations(problem: ScheduleProblem, starts: Starts, orders: Sequence[Sequence[Instruction]]) -> list[str]:
    """Return what is wrong with a schedule: its times, its orders, its memory."""
    count = problem.micro_batches
    if len(starts) != len(problem.blocks) or any(len(row) != count for row in starts):
        return ["not every block runs once for every micro-batch"]
    end = max(start for row in starts for start in row)
    slack = SLACK * (end + sum(b.duration for b in problem.blocks))
    wrong = [
        f"{problem.blocks[b].at(i)} starts at {row[i]}"
        for b, row in enumerate(starts)
        for i in range(count)
        if row[i] < 0
    ]
    for edge in problem.dependencies:
        before, after = problem.blocks[edge.before], problem.blocks[edge.after]
        wrong += [
            f"{after.at(i)} starts before {before.at(i)} has ended"
            for i in range(count)
            if starts[edge.after][i] < starts[edge.before][i] + before.duration + edge.lag - slack
        ]
    wrong += _overlaps(problem, starts, slack)
    wrong += _orders(problem, starts, orders, slack)
    return wrong + _memory(problem, orders)


def _overlaps(problem: ScheduleProblem, starts: Starts, slack: float) -> list[str]:
    spans: dict[int, list[tuple[float, float, Instruction]]] = {}
    for block, row in zip(problem.blocks, starts, strict=True):
        for device in block.devices:
            spans.setdefault(device, []).extend((s, s + block.duration, block.at(i)) for i, s in enumerate(row))
    wrong = []
    for device, each in spans.items():
        until, last = 0.0, None
        for start, end, instruction in sorted(each):
            if start < until - slack:
                wrong.append(f"device {device} runs {instruction} while it runs {last}")
            if end > until:
                until, last = end, instruction
    return wrong


def _orders(
    problem: ScheduleProblem, starts: Starts, orders: Sequence[Sequence[Instruction]], slack: float
) -> list[str]:
    """Compare the orders with the times, and run them: do the devices ever wait for each other?"""
    begin = {
        block.at(i): start for block, row in zip(problem.blocks, starts, strict=True) for i, start in enumerate(row)
    }
    wrong = []
    for device, order in enumerate(orders):
        own = {i for block in problem.blocks if device in block.devices for i in map(block.at, range(len(starts[0])))}
        if set(order) != own or len(order) != len(own):
            wrong.append(f"the order of device {device} is not that of its blocks")
        elif any(begin[b] < begin[a] - slack for a, b in pairwise(order)):
            wrong.append(f"the order of device {device} is not that of its times")
    waits: dict[tuple[Kind, int], list[tuple[Kind, int]]] = {}
    for edge in problem.dependencies:
        before, after = problem.blocks[edge.before], problem.blocks[edge.after]
        waits.setdefault((after.kind, after.stage), []).append((before.kind, before.stage))
    blocks = {(b.kind, b.stage): b for b in problem.blocks}

    def waits_for(instruction: Instruction) -> Collection[Instruction]:
        sources = waits.get((instruction.kind, instruction.stage), ())
        return [blocks[key].at(instruction.micro) for key in sources]

    if not wrong and total_order(orders, waits_for).stuck:
        wrong.append("the devices wait for each other for ever")
    return wrong


def _memory(problem: ScheduleProblem, orders: Sequence[Sequence[Instruction]]) -> list[str]:
    blocks = {(b.kind, b.stage): b for b in problem.blocks}
    wrong = []
    for device, order in enumerate(orders):
        live = 0.0
        for instruction in order:
            block = blocks[instruction.kind, instruction.stage]
            live += block.allocates
            if live > problem.limits[device] * (1 + SLACK):
                wrong.append(f"device {device} holds {live:g} bytes at {instruction}")
            live -= block.frees
    return wrong
