"""Make the events of a step that ran from what its ranks recorded, each call with the cause that its plan has for
it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nnscaler.codegen.compiled_program import Program
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.errors import NnscalerError
from nnscaler.instructions import read_instruction
from nnscaler.performance.predicted_events import PlacedEvent, devices_of, rank_calls
from nnscaler.performance.timeline_events import SENT, VERSION, Event, Ranks, StepEvents
from nnscaler.runtime.communication.recording_communicator import RecordedEvent
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import launch
from nnscaler.runtime.program.program_directory import groups_of, pairs_of, read_program

Records = Sequence[Sequence[RecordedEvent]]  # by rank
_LIMIT = 600.0  # seconds of a run
_NAMES = {  # what the executor does beside its schedule
    "the gathering of parameters": "gather",
    "the gradient sum": "gradient",
    "the sum of the loss": "loss",
}


def run_recorded(program: Program) -> Records:
    """Run the program in a process for each rank on this machine, and return what each recorded of one step.

    Raises NnscalerError("run_failed").
    """
    with tempfile.TemporaryDirectory(prefix="nnscaler_events_") as folder:
        path = program.save(Path(folder) / "program")
        stages = read_program(path).stages()
        job = JobSpecification(
            "nnscaler.runtime.jobs.measure_on_ranks:record_step",
            program.manifest.ranks,
            {"program": str(path)},
            groups=tuple(groups_of(stages)),
            pairs=tuple(pairs_of(stages)),
        )
        outcome = launch(job, timeout=_LIMIT)
        if not outcome.ok:
            raise NnscalerError(
                "run_failed", f"the program did not run: {outcome.describe()}", help="verify-plan says more of it"
            )
        return outcome.results()


def measured_events(
    communicated: CommunicatedGraph, placed: Sequence[Sequence[PlacedEvent]], records: Records
) -> StepEvents:
    """Return what ranks recorded as events. `placed`: those of the plan, by device.

    Every call of a rank must be the one that the plan has at its place. Raises NnscalerError("calls_differ").
    """
    devices = devices_of(communicated)
    starts, ends = ([getattr(e, name) for made in records for e in made] for name in ("start", "end"))
    began = min(starts, default=0.0)
    numbers: dict[tuple[int | None, Ranks, int], int] = {}
    found = [
        event
        for device in devices
        for rank in device.ranks
        for event in _of_rank(rank, device.device, placed[device.device], records[rank], began, numbers)
    ]
    return StepEvents(VERSION, "measured", "seconds", max(ends, default=0.0) - began, devices, tuple(found))


def _of_rank(
    rank: int,
    device: int,
    placed: Sequence[PlacedEvent],
    made: Sequence[RecordedEvent],
    began: float,
    numbers: dict[tuple[int | None, Ranks, int], int],
) -> Iterator[Event]:
    """Yield the events of a rank. `numbers`: of messages; it gets those that are new."""
    causes = _causes(rank, rank_calls(placed, rank), [record for record in made if record.kind != "run"])
    seen: Counter[tuple[str, int | None, Ranks]] = Counter()
    for record in sorted(made, key=lambda r: (r.start, -r.end)):
        start, end = record.start - began, record.end - began
        name = _NAMES.get(record.instruction, record.instruction)
        instruction = read_instruction(name)
        if record.kind == "run":
            kind = instruction.kind if instruction else "prepare" if name.startswith("prepare") else "step"
            stage = instruction.stage if instruction else int(name.rpartition(" ")[2]) if kind == "prepare" else -1
            yield Event("compute", kind, device, (rank,), start, end, name, stage)
            continue
        cause, group = causes[id(record)]
        message = None
        if cause.message is not None:
            seen[record.kind, cause.message, group] += 1
            key = (cause.message, group, seen[record.kind, cause.message, group])
            message = numbers.setdefault(key, len(numbers))
        yield Event(
            "communication", record.kind, device, (rank,), start, end, name, cause.stage, (group,), record.bytes,
            cause.direction, cause.axis, record.dtype, cause.module, cause.where, message,
        )  # fmt: skip


def _causes(
    rank: int, planned: Sequence[tuple[Event, Ranks]], calls: Sequence[RecordedEvent]
) -> dict[int, tuple[Event, Ranks]]:
    """Return what each call of a rank is in the plan, by identity.

    What a rank begins and waits for later may come at any place of its instruction; all else comes in the plan's order.
    Raises NnscalerError where a call is not the plan's.
    """
    found: dict[int, tuple[Event, Ranks]] = {}
    left = [(entry, _planned(entry)) for entry in planned]
    at = 0  # in `left`, after the last call that was waited for at once
    for number, call in ((n, c) for n, c in enumerate(calls) if c.hidden is None):
        here = next((i for i, (_, told) in enumerate(left[at:], at) if told == _made(call)), None)
        if here is None:
            raise _differ(number, rank, _made(call), left[at][1] if at < len(left) else "no call")
        found[id(call)], at = left.pop(here)[0], here
    for number, call in ((n, c) for n, c in enumerate(calls) if c.hidden is not None):
        here = next((i for i, (_, told) in enumerate(left) if told == _made(call)), None)
        if here is None:
            raise _differ(number, rank, _made(call), left[0][1] if left else "no call")
        found[id(call)] = left.pop(here)[0]
    if left:
        raise _differ(len(calls), rank, "no call", left[0][1])
    return found


def _differ(number: int, rank: int, made: str, planned: str) -> NnscalerError:
    message = f"call {number} of rank {rank} is {made}, and the plan has {planned} there"
    help = "records are of another plan or model; without --records this is a bug of nnScaler: please report it"
    return NnscalerError("calls_differ", message, help=help)


def _planned(entry: tuple[Event, Ranks]) -> str:
    event, group = entry
    return _told(event.kind, group, event.bytes, event.dtype, event.instruction)


def _made(call: RecordedEvent) -> str:
    name = _NAMES.get(call.instruction, call.instruction)
    return _told(call.kind, call.ranks, call.bytes, call.dtype, name)


def _told(kind: str, group: Ranks, size: int, dtype: str, instruction: str) -> str:
    ranks = f"{group[0]} -> {group[1]}" if kind in (SENT, "recv") else f"over ranks {list(group)}"
    return f"{kind} of {size} bytes of {dtype} {ranks} in {instruction}"
