"""Check a schedule against its problem: from the times and the orders alone, not from how they were found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from nnscaler.instructions import Instruction, Kind, total_order
from nnscaler.scheduling.search.bound import SLACK
from nnscaler.scheduling.search.job_shop_graph import Starts
from nnscaler.scheduling.search.problem import ScheduleProblem


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
