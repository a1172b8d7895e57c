"""Check every role's order of instructions: it is complete, and agrees with one total order over all roles.

The total order respects every message and every gradient that comes back, and is the certificate that nothing waits for
ever. The rules of one order, and what each instruction waits for, are those of `nnscaler.instructions`; what a
stage receives and sends is read in its text.

Of a stream the orders are read for as many batches as it takes until all devices repeat themselves. The staleness of a
stage is that of delayed SGD, the updates of the batches that are on the way between its forward and its backward
(`staleness_of`); the versions that an order reads follow from the order alone. The two must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nnscaler.instructions import (
    Instruction,
    OrderMistake,
    StagePasses,
    batches_written,
    check_order,
    going_on,
    shows_its_middle,
    total_order,
    waits_of,
)
from verify.programs.delayed_sgd_staleness import semantics, staleness_of
from verify.programs.typing.program_files.rank_program_syntax import RoleText, StageText
from verify.programs.typing.typed_value import Mistake


@dataclass(frozen=True, slots=True)
class InstructionOrder:
    """`total`: all instructions of all roles, in an order in which they can run. `wrong`: per role. `semantics`: what
    the orders of a stream train by; empty for those of a step."""

    total: tuple[Instruction, ...]
    wrong: tuple[tuple[RoleText, Mistake], ...]
    semantics: str = ""


def check_schedule(roles: Sequence[RoleText], stages: Mapping[int, StageText], trains: bool = True) -> InstructionOrder:
    """Check the schedules of all roles. Raises nothing: mistakes are in the result.

    `trains`: the model has a loss, so that every forward has its backward; else there is none.
    """
    orders: list[tuple[Instruction, ...]] = []
    wrong: list[tuple[RoleText, Mistake]] = []
    for role in roles:
        passes = {stage.index: _passes(stage, trains, batches_written(role.schedule)) for stage in role.stages}
        order, mistakes = check_order(role.schedule, passes)
        orders.append(order)
        if not all(map(shows_its_middle, passes.values())):
            written = f"SCHEDULE of {role.file} is written for {batches_written(role.schedule)} batches"
            cause = "a stream goes on as it is written, and here it is not known how"
            wrong.append((role, Mistake("version_differs", written, cause)))
        wrong += [(role, mistake) for stage in role.stages for mistake in _stream_mistakes(stage, stages)]
        wrong += [(role, _mistake(role, mistake)) for mistake in mistakes]
    told = ""
    wrong += [(role, mistake) for role in roles for mistake in _written_mistakes(role, roles)]
    if any(stage.staleness is not None for stage in stages.values()):
        told = semantics(len(stages))
        # any batch waits for those at most so far apart as there are stages: longer streams only repeat this
        longest = max(map(len, orders)) + 2 * len(stages)
        orders = [tuple(going_on(order, lambda batch: batch < longest)) for order in orders]
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
    return InstructionOrder(found.done, tuple(wrong), told)


def _written_mistakes(role: RoleText, roles: Sequence[RoleText]) -> Iterator[Mistake]:
    """Yield what is wrong with how many batches the order of a stream is written for: messages are named by places,
    which are free again after so many."""
    written, other = batches_written(role.schedule), batches_written(roles[0].schedule)
    if written != other and any(stage.staleness is not None for stage in role.stages):
        message = f"SCHEDULE of {role.file} is written for {written} batches, and that of {roles[0].file} for {other}"
        yield Mistake("deadlock", message, "a message would be sent under one name and awaited under another")


def _passes(stage: StageText, trains: bool, written: int) -> StagePasses:
    """Return the passes of a stage. Where neither the loss nor a gradient arrives there is nothing to go back from.

    `written`: for how many batches its order is written, which is for a stream to choose.
    """
    times = stage.times if stage.staleness is None else (written,)
    if not trains:
        return StagePasses(times, "never")
    roots = stage.loss is not None or any(send.needs_grad for send in stage.sends)
    return StagePasses(times, "must" if roots else "may", stage.staleness, stage.versions)


def _stream_mistakes(stage: StageText, stages: Mapping[int, StageText]) -> Iterator[Mistake]:
    """Yield what is wrong with the declarations of a stage of a stream."""
    if stage.staleness is None:
        if any(other.staleness is not None for other in stages.values()):
            message = f"stage {stage.index} declares no staleness, and others do"
            yield Mistake("version_differs", message, "its parameters would be updated when no step ends")
        return
    right = staleness_of(stage.index, len(stages))
    if stage.staleness != right:
        message = f"stage {stage.index} of {len(stages)} has the staleness {stage.staleness}, and delayed SGD {right}"
        yield Mistake("version_differs", message, "its batches read older or newer parameters than the reference's")
    if stage.micro_batches != 1:
        message = f"stage {stage.index} cuts the batches of a stream into {stage.micro_batches} micro-batches"
        yield Mistake("gradient_reduced_wrongly", message, "each of them would be an update of its own")
    if stage.slices != 1:
        message = f"stage {stage.index} cuts the batches of a stream into {stage.slices} slices"
        yield Mistake("gradient_reduced_wrongly", message, "each of them would be an update of its own")
    for stored in stage.stored:
        if stored.kind == "parameter" and (stored.copies or stored.rest or stored.master):
            message = f"stage {stage.index} updates `{stored.fqn}` batch by batch, and it is tied, in shards or cast"
            yield Mistake("version_differs", message, "what a step does once with it has no moment in a stream")
    if stage.updates:
        message = f"stage {stage.index} changes the buffers {sorted(stage.updates.values())} where no step ends"
        yield Mistake("version_differs", message, "batches that are on the way read them")


_WRONG_UPDATE: Mapping[str, str] = {
    "twice": "its gradient is applied twice",
    "missing": "its gradient is lost, and every later version lacks it",
    "early": "it applies a gradient that is not there yet, or another batch's",
    "unwanted": "a version that nothing declares: other passes of the step read it",
}


def _mistake(role: RoleText, mistake: OrderMistake) -> Mistake:
    """Return the mistake with its code of the catalogue and its cause."""
    message, forward = f"SCHEDULE of {role.file} {mistake.message}", mistake.word[:1] == "F"
    update = mistake.word[:1] == "U"
    if mistake.kind in ("stale", "overwritten"):
        cause = "a backward goes through other parameters than its forward: stashing is missing"
        return Mistake("version_differs", message, cause if mistake.kind == "overwritten" else None)
    if update and mistake.kind in ("twice", "missing", "early", "unwanted"):
        return Mistake("version_differs", message, _WRONG_UPDATE[mistake.kind])
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
