"""Dependencies between instructions, communication included, and the proof that a schedule cannot deadlock."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, Instruction, StageEdge, StagePasses, check_order, total_order, waits_of
from nnscaler.scheduling.schedule import BACKWARD, Schedule


def chain(stages: int) -> frozenset[StageEdge]:
    """Return the edges of a pipeline in which every stage feeds the next one."""
    return frozenset((s, s + 1) for s in range(stages - 1))


def dependencies(schedule: Schedule, edges: Collection[StageEdge]) -> dict[Instruction, tuple[Instruction, ...]]:
    """Return by instruction those that must be finished before it starts, besides those that its device runs before it.

    F(consumer) waits for the tensors of F(producer); a backward of the producer for the gradients of the consumer's and
    for its own F. An edge may skip stages. A consumer that runs no backward sends no gradient.
    """
    every = {i for order in schedule.orders for i in order}
    trained = {i.stage for i in every if i.kind in BACKWARD}
    sources: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for producer, consumer in sorted(edges):
        if producer != consumer:
            sources.setdefault(consumer, []).append(producer)
            if consumer in trained:
                readers.setdefault(producer, []).append(consumer)
    ordered = dict.fromkeys(i for order in schedule.orders for i in order)
    return {i: waits_of(i, sources.get(i.stage, ()), readers.get(i.stage, ()), every) for i in ordered}


def check_acyclic(schedule: Schedule, edges: Collection[StageEdge]) -> tuple[Instruction, ...]:
    """Return the certificate that the schedule cannot deadlock: an order of all instructions of all devices that agrees
    with every dependency and with each device's own order.

    Raises NnscalerError("bad_schedule") if an instruction is missing, repeated or on a wrong device, and
    NnscalerError("schedule_deadlock") that names a cycle of devices waiting for each other.
    """
    check_complete(schedule)
    waits = dependencies(schedule, edges)
    found = total_order(schedule.orders, waits.__getitem__)
    if found.stuck:
        raise _deadlock(schedule, found.stuck)
    return found.done


def check_complete(schedule: Schedule) -> None:
    """Check that every stage runs forward once per micro-batch, on its device, and then backward, whole or in halves,
    where a gradient reaches it: else NnscalerError("bad_schedule")."""
    times = schedule.times
    for device, order in enumerate(schedule.orders):
        own = [s for s, d in enumerate(schedule.devices) if d == device]
        passes = {s: StagePasses(times, "never" if s in schedule.untrained else "must") for s in own}
        _, mistakes = check_order([str(i) for i in order], passes)
        for mistake in mistakes[:1]:
            help = FORM
            if mistake.kind != "word":
                help = (
                    f"there are {schedule.stages} stages, {schedule.micro_batches} micro-batches, and device {device} "
                    f"has the stages {own}"
                )
            raise NnscalerError(
                "bad_schedule", f"schedule {schedule.name}: device {device} {mistake.message}", help=help
            )


def _deadlock(schedule: Schedule, stuck: Mapping[int, tuple[Instruction, Instruction]]) -> NnscalerError:
    """Follow from each stuck device to the one it waits for until a device comes up again."""
    device = min(stuck)
    path: list[int] = []
    while device not in path:
        path.append(device)
        device = schedule.devices[stuck[device][1].stage]
    cycle = path[path.index(device) :]
    lines = []
    for waiting in cycle:
        head, unmet = stuck[waiting]
        other = schedule.devices[unmet.stage]
        behind = "" if unmet == stuck[other][0] else f", which comes after {stuck[other][0]} there"
        lines.append(f"device {waiting} is at {head} and waits for {unmet} of device {other}{behind}")
    return NnscalerError(
        "schedule_deadlock",
        f"schedule {schedule.name} deadlocks: " + "; ".join(lines),
        help="change the order of one of these devices so that what is waited for comes first",
    )
