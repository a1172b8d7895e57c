"""Check every role's order of instructions: it is complete, and agrees with one total order over all roles.

The total order respects every message and every gradient that comes back, and is the certificate that nothing waits for
ever. The rules of one order, and what each instruction waits for, are those of `nnscaler.instructions`; what a stage
receives and sends is read in its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nnscaler.instructions import Instruction, OrderMistake, StagePasses, check_order, total_order, waits_of
from verify.programs.typing.roles.text import RoleText, StageText
from verify.programs.typing.typed_value import Mistake


@dataclass(frozen=True, slots=True)
class Order:
    """`total`: all instructions of all roles, in an order in which they can run. `wrong`: per role."""

    total: tuple[Instruction, ...]
    wrong: tuple[tuple[RoleText, Mistake], ...]


def check_schedule(roles: Sequence[RoleText], stages: Mapping[int, StageText], trains: bool = True) -> Order:
    """Check the schedules of all roles. Raises nothing: mistakes are in the result.

    `trains`: the model has a loss, so that every forward has its backward; else there is none.
    """
    orders: list[tuple[Instruction, ...]] = []
    wrong: list[tuple[RoleText, Mistake]] = []
    for role in roles:
        order, mistakes = check_order(role.schedule, {stage.index: _passes(stage, trains) for stage in role.stages})
        orders.append(order)
        wrong += [(role, _mistake(role, mistake)) for mistake in mistakes]
    every = {i for order in orders for i in order}

    def waits(instruction: Instruction) -> tuple[Instruction, ...]:
        stage = stages[instruction.stage]
        sources = [r.stage for r in stage.receives if r.stage != stage.index]
        readers = [s.stage for s in stage.sends if s.needs_grad and s.stage != stage.index]
        return waits_of(instruction, sources, readers, every)

    found = total_order(orders, waits)
    if found.stuck:
        heads = [f"{roles[r].file} is at {i} and waits for {w}" for r, (i, w) in found.stuck.items()]
        awaited = {w for _, w in found.stuck.values()}
        cause = "each waits for what comes later in another's order: a mismatched order of sends and receives"
        if every.isdisjoint(awaited):
            cause = "what is waited for is in no schedule: a missing send, or a backward that never runs"
        mistake = Mistake("deadlock", "the schedule comes to a halt: " + "; ".join(heads), cause)
        wrong.append((roles[min(found.stuck)], mistake))
    return Order(found.done, tuple(wrong))


def _passes(stage: StageText, trains: bool) -> StagePasses:
    """Return the passes of a stage. Where neither the loss nor a gradient arrives there is nothing to go back from."""
    if not trains:
        return StagePasses(stage.times, "never")
    roots = stage.loss is not None or any(send.needs_grad for send in stage.sends)
    return StagePasses(stage.times, "must" if roots else "may")


def _mistake(role: RoleText, mistake: OrderMistake) -> Mistake:
    """Return the mistake with its code of the catalogue and its cause."""
    message, forward = f"SCHEDULE of {role.file} {mistake.message}", mistake.word[:1] == "F"
    if mistake.kind in ("word", "foreign", "early"):
        return Mistake("deadlock", message)
    if mistake.kind == "slices":
        cause = "a slice reads rows that are not there yet" if forward else "gradients of earlier slices' rows are lost"
        return Mistake("not_covered" if forward else "gradient_reduced_wrongly", message, cause)
    if mistake.kind == "unwanted":
        return Mistake("gradient_reduced_wrongly", message, "there is nothing to start a backward from")
    if mistake.kind == "missing" and forward:
        return Mistake("not_covered", message, "micro-batches are left out of the step: a wrong count of micro-batches")
    if mistake.kind == "missing":
        cause = "gradients are summed before the last micro-batch's backward: its part is missing"
        return Mistake("gradient_reduced_wrongly", message, cause)
    return Mistake("gradient_reduced_wrongly", message, None if forward else "its gradient would be added twice")
