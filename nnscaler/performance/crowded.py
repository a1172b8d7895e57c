"""Event simulation of a schedule on devices that share the cores of one machine: a device is faster while others
wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nnscaler.scheduling.dependencies import Edge, check_acyclic, dependencies
from nnscaler.scheduling.schedule import Instruction, Schedule
from nnscaler.scheduling.timeline import Span, Timeline, timeline_of


def simulate_crowded(
    schedule: Schedule,
    edges: Collection[Edge],
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: Sequence[int],
    relief: Callable[[int], float],
) -> Timeline:
    """Simulate as `timeline.simulate`, with costs per stage that hold while every rank computes.

    `ranks`: of each device; `relief(n)`: the share of its cost that an instruction takes while n ranks compute. A
    device that waits computes nothing.
    """
    check_acyclic(schedule, edges)
    costs = {"F": forward, "B": backward}
    waits = {i: dependencies(i, edges) for order in schedule.orders for i in order}
    position = [0] * len(schedule.orders)
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    finished: set[Instruction] = set()
    running: dict[int, tuple[Instruction, float, float]] = {}  # device: what, since when, cost that is left
    now = 0.0
    while True:
        for device, order in enumerate(schedule.orders):
            if device not in running and position[device] < len(order):
                instruction = order[position[device]]
                if all(w in finished for w in waits[instruction]):
                    running[device] = instruction, now, costs[instruction.kind][instruction.stage]
        if not running:
            return timeline_of(schedule, rows)
        share = relief(sum(ranks[device] for device in running))
        passed = min(left for _, _, left in running.values())
        now += passed * share
        for device, (instruction, start, left) in list(running.items()):
            if left <= passed:
                rows[device].append(Span(instruction, start, now))
                finished.add(instruction)
                position[device] += 1
                del running[device]
            else:
                running[device] = instruction, start, left - passed
