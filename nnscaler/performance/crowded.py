"""Event simulation of a schedule on devices that share cores: a device is faster while others wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nnscaler.instructions import Instruction, StageEdge
from nnscaler.scheduling.dependencies import check_acyclic, dependencies
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, Span, Timeline, timeline_of


def simulate_crowded(
    schedule: Schedule,
    edges: Collection[StageEdge],
    costs: PassCosts,
    ranks: Sequence[int],
    relief: Callable[[int], float],
    before: Sequence[float] | None = None,
) -> Timeline:
    """Simulate as `timeline.simulate`, with costs per stage that hold while every rank computes.

    `ranks`: of each device; `relief(n)`: the share of its cost that an instruction takes while n ranks compute. A
    device that waits computes nothing. `before`: cost of what each device does before its first instruction.
    """
    check_acyclic(schedule, edges)
    waits = dependencies(schedule, edges)
    position = [0] * len(schedule.orders)
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    finished: set[Instruction] = set()
    # device: what, since when, cost that is left
    running: dict[int, tuple[Instruction | None, float, float]] = {
        device: (None, 0.0, cost) for device, cost in enumerate(before or ()) if cost
    }
    now = 0.0
    while True:
        for device, order in enumerate(schedule.orders):
            if device in running or position[device] == len(order):
                continue
            instruction = order[position[device]]
            together = schedule.devices[instruction.stage]
            there = all(d not in running and schedule.orders[d][position[d] :][:1] == (instruction,) for d in together)
            if there and all(w in finished for w in waits[instruction]):
                running.update(dict.fromkeys(together, (instruction, now, costs.of(instruction))))
        if not running:
            return timeline_of(schedule, rows)
        share = relief(sum(ranks[device] for device in running))
        passed = min(left for _, _, left in running.values())
        now += passed * share
        for device, (run, start, left) in list(running.items()):
            if left <= passed:
                if run is not None:
                    rows[device].append(Span(run, start, now))
                    finished.add(run)
                    position[device] += 1
                del running[device]
            else:
                running[device] = run, start, left - passed
