"""Dependencies between instructions, communication included, and the proof that a schedule cannot deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.schedule import Instruction, Kind, Schedule

Edge = tuple[int, int]  # producer stage, consumer stage


def chain(stages: int) -> frozenset[Edge]:
    """Return the edges of a pipeline in which every stage feeds the next one."""
    return frozenset((s, s + 1) for s in range(stages - 1))


def dependencies(instruction: Instruction, edges: Collection[Edge]) -> tuple[Instruction, ...]:
    """Return the instructions that must be finished before this one starts, besides those that its device runs before
    it.

    F(consumer) waits for the tensors of F(producer); B(producer) for the gradients of B(consumer) and for its own F. An
    edge may skip stages.
    """
    stage, micro = instruction.stage, instruction.micro
    if instruction.kind == "F":
        return tuple(Instruction("F", p, micro) for p, c in sorted(edges) if c == stage and p != c)
    gradients = (Instruction("B", c, micro) for p, c in sorted(edges) if p == stage and p != c)
    return (Instruction("F", stage, micro), *gradients)


def check_acyclic(schedule: Schedule, edges: Collection[Edge]) -> tuple[Instruction, ...]:
    """Return the certificate that the schedule cannot deadlock: an order of all instructions of all devices that agrees
    with every dependency and with each device's own order.

    Raises NnscalerError("bad_schedule") if an instruction is missing, repeated or on a wrong device, and
    NnscalerError("schedule_deadlock") that names a cycle of devices waiting for each other.
    """
    check_complete(schedule)
    waits = {i: dependencies(i, edges) for order in schedule.orders for i in order}
    position = [0] * len(schedule.orders)
    done: dict[Instruction, None] = {}
    while len(done) < len(waits):
        before = len(done)
        for device, order in enumerate(schedule.orders):
            while position[device] < len(order) and all(w in done for w in waits[order[position[device]]]):
                done[order[position[device]]] = None
                position[device] += 1
        if len(done) == before:
            heads = {d: o[p] for d, (o, p) in enumerate(zip(schedule.orders, position, strict=True)) if p < len(o)}
            raise _deadlock(schedule, heads, {d: _unmet(waits[head], done) for d, head in heads.items()})
    return tuple(done)


def check_complete(schedule: Schedule) -> None:
    """Check that every stage runs forward, and backward where the schedule trains, once per micro-batch, on its device:
    else NnscalerError("bad_schedule")."""
    kinds: tuple[Kind, ...] = ("F", "B") if schedule.trains else ("F",)
    counts = Counter((device, i) for device, order in enumerate(schedule.orders) for i in order)
    for stage, device in enumerate(schedule.devices):
        for micro in range(schedule.micro_batches):
            for instruction in (Instruction(kind, stage, micro) for kind in kinds):
                times = counts.pop((device, instruction), 0)
                if times != 1:
                    raise NnscalerError("bad_schedule", f"device {device} runs {instruction} {times} times, not once")
    for device, instruction in counts:
        raise NnscalerError(
            "bad_schedule",
            f"device {device} runs {instruction}, which is not its own",
            help=f"there are {schedule.stages} stages, {schedule.micro_batches} micro-batches, "
            f"and device {device} has the stages {[s for s, d in enumerate(schedule.devices) if d == device]}",
        )


def _unmet(waits: Collection[Instruction], done: Collection[Instruction]) -> Instruction:
    return next(w for w in waits if w not in done)


def _deadlock(schedule: Schedule, heads: Mapping[int, Instruction], unmet: Mapping[int, Instruction]) -> NnscalerError:
    """Follow from each stuck device to the one it waits for until a device comes up again."""
    device = min(heads)
    path: list[int] = []
    while device not in path:
        path.append(device)
        device = schedule.devices[unmet[device].stage]
    cycle = path[path.index(device) :]
    lines = []
    for stuck in cycle:
        other = schedule.devices[unmet[stuck].stage]
        behind = "" if unmet[stuck] == heads[other] else f", which comes after {heads[other]} there"
        lines.append(f"device {stuck} is at {heads[stuck]} and waits for {unmet[stuck]} of device {other}{behind}")
    return NnscalerError(
        "schedule_deadlock",
        f"schedule {schedule.name} deadlocks: " + "; ".join(lines),
        help="change the order of one of these devices so that what is waited for comes first",
    )
