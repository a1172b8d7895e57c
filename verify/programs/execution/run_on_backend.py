"""Run a program on threads of this process or as processes over gloo or NCCL, and say why a run did not end."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from op_registry.source_location import SourceLocation

from nnscaler.atomic_writes import NO_ROOM, no_room
from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line
from nnscaler.runtime.communication.communicator import CommunicationError, Communicator, ProgramError, UnderWayError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs.job import JobOutcome, JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.runtime.jobs.load_adjusted_clock import join_within
from nnscaler.runtime.program.program_directory import groups_of, pairs_of, read_program
from verify.child_processes import Died, TimedOut, run_apart
from verify.programs.execution.record_rank_steps import RankResult, Task, run_rank
from verify.programs.source_map import SourceMap, describe_line
from verify.results.finding import Finding
from verify.results.verdict import Verdict

# Runs that did not end: what it means that ranks raised, disagreed, waited for each other, died or ran out of time.
# The reference ran on the same batch before, so a program that cannot is refuted. Only a time-out with ranks that
# were still computing decides nothing.

Kind = Literal["communication_mismatch", "memory_under_way", "deadlock", "rank_raises", "rank_died", "timed_out"]
_KEY = re.compile(r"key \((?P<tensor>[^\s@)]+)")
_SUMMED = re.compile(r"the gradient sum of (?P<names>`[^`]+`(?:, `[^`]+`)*)")
_PLACE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """The way in which a run of the program failed.

    message       the text of the runtime
    rank          the rank that failed first, where that is known
    waiting       rank -> the call that it waited for, where that is known
    from_outside  the cause may be the machine (killed for memory), not the program
    """

    kind: Kind
    message: str
    rank: int | None = None
    waiting: Mapping[int, str] = field(default_factory=dict)
    from_outside: bool = False

    @property
    def verdict(self) -> Verdict:
        return Verdict.INCONCLUSIVE if self.kind == "timed_out" or self.from_outside else Verdict.REFUTED


def finding_of(failure: Failure, program: Path, places: SourceMap) -> Finding:
    """Return the finding, with places in the model and in the program, which is in the folder `program`.

    The lines of the generated program that the failure names are looked up, so that the finding names the tensors:
    those of collectives first, for a rank that left one out makes others wait for messages.
    """
    text = "\n".join([failure.message, *failure.waiting.values()])
    named = _named_lines(text, program)
    lines = [line for place in named if (line := describe_line(place.file, place.line)) is not None]
    related = tuple(("generated program", SourceLocation(line.file, line.line, line.text)) for line in lines)
    messages = [m["tensor"] for m in _KEY.finditer(text)]
    summed = [name for m in _SUMMED.finditer(text) for name in m["names"].strip("`").split("`, `")]
    names = [*(name for line in lines if not line.is_arguments for name in line.names), *summed, *messages]
    tensor = " at " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)) if names else ""
    parameters = places.of_parameters() if summed else {}
    found = [
        *(places.of_line(line.model) for line in lines),
        *(parameters.get(name) for name in summed),
        *(places.of_tensor(name) for name in messages),
    ]
    where = next((place for place in found if place is not None), None)
    facts = {f"rank {rank}": waits for rank, waits in sorted(failure.waiting.items())}
    if failure.rank is not None:
        facts = {"rank": str(failure.rank), **facts}
    first, *rest = failure.message.splitlines()
    for number, detail in enumerate(rest):
        facts.setdefault(
            f"detail {number}" if ":" not in detail else detail.split(":")[0].strip(), _after_colon(detail)
        )
    return Finding(
        failure.kind, _message(failure, first, tensor), where, facts, help=_HELP[failure.kind], related=related
    )


def _message(failure: Failure, first: str, tensor: str) -> str:
    match failure.kind:
        case "deadlock":
            return f"the program hangs{tensor}: every rank that still runs waits for another one"
        case "communication_mismatch":
            return f"ranks disagree on a communication{tensor}: {first.rstrip(':')}"
        case "memory_under_way":
            return f"memory is used while communication reads or writes it{tensor}: {first}"
        case "rank_raises":
            return f"the program raises{tensor}, the model does not: {first}"
        case "rank_died":
            return f"a rank's process ended without a result: {first}"
    return f"the time was up while ranks were computing: {first}"


_HELP: Mapping[str, str | None] = {
    "deadlock": "the ranks of a group must make the same calls in the same order, and every send needs its recv",
    "communication_mismatch": "the ranks of a group must make the same calls in the same order",
    "memory_under_way": "until what was begun is waited for, what it reads is not written, and what it writes not used",
    "rank_raises": None,
    "rank_died": "a kernel may crash of unchecked sizes; a process that is killed for memory leaves no other trace",
    "timed_out": "give it more time: --timeout SECONDS",
}


def _named_lines(text: str, program: Path) -> list[SourceLocation]:
    """Return the lines of the program that a text names, each once, the first three."""
    every = (SourceLocation(m["file"], int(m["line"])) for m in _PLACE.finditer(text))
    found = dict.fromkeys(place for place in every if Path(place.file).resolve().is_relative_to(program.resolve()))
    return list(found)[:3]


def _after_colon(text: str) -> str:
    return text.partition(":")[2].strip() or text.strip()


STALL = 6.0  # seconds in which no rank gets on, all of them waiting, that make a deadlock
GRACE = 10.0  # seconds after its time that the simulator has to say that it is up
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
Result = TypeVar("Result")
Observe = Callable[[int, int, int, str, str, torch.Tensor], None]  # rank, stage, micro-batch, phase, name, tensor


def run_program(
    task: Task, ranks: int, backend: str, timeout: float, server: ForkServer | None = None
) -> tuple[RankResult, ...] | Failure:
    """Run the program on all ranks. `timeout`: seconds for the whole run; `server`: to start processes from."""
    if backend == "simulator":
        return run_simulator(task, ranks, timeout)
    return run_processes(task, ranks, backend, timeout, server)


def run_simulator(
    task: Task, ranks: int, timeout: float, observe: Observe | None = None, apart: bool = True
) -> tuple[RankResult, ...] | Failure:
    """Run the program with a thread per rank. Deadlocks and collectives that do not match are proven, not timed.

    The threads are in a child process, which a wrong program may kill; with `observe`, or where the caller is such a
    child itself (`apart` false), they are in this process.
    """

    def on_rank(communicator: Communicator) -> RankResult:
        return run_rank(communicator, task, None if observe is None else partial(observe, communicator.rank))

    return simulate(on_rank, ranks, timeout, task.program, apart and observe is None)


def simulate(
    on_rank: Callable[[Communicator], Result],
    ranks: int,
    timeout: float,
    program: str,
    apart: bool,
    refused: Collection[str] = (),
) -> tuple[Result, ...] | Failure:
    """Run `on_rank` on a thread per rank, of a child process where that is to be `apart`. `program`: its folder.

    Raises an NnscalerError of a rank whose code is in `refused`.
    """
    if apart:
        found = run_apart(lambda: simulate(on_rank, ranks, timeout, program, False, refused), timeout + GRACE)
        return failure_of_process(found, program) if isinstance(found, Died | TimedOut) else found
    outcome: list[tuple[Result, ...] | BaseException] = []
    simulator = Simulator(ranks)

    def work() -> None:
        try:
            outcome.append(tuple(simulator.run(on_rank)))
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises (SystemExit too) is what we look for
            outcome.append(error)

    thread = threading.Thread(target=work, name="simulator", daemon=True)
    thread.start()
    join_within(thread, timeout)
    if not outcome:
        simulator.stop()
        return Failure("timed_out", f"{timeout:g} s on the simulator")
    (ended,) = outcome
    if isinstance(ended, NnscalerError) and ended.code in refused:
        raise ended
    return failure_of(ended) if isinstance(ended, BaseException) else ended


def failure_of_process(event: Died | TimedOut, program: str) -> Failure:
    """Classify the end of the process of all ranks, which left no result."""
    if isinstance(event, TimedOut):
        return Failure("timed_out", f"{event.seconds:.0f} s on the simulator")
    lines = [f"{event.how} (the process of all ranks, on the simulator)"]
    frames = [m.group("file", "line") for m in _FRAME.finditer(event.trace)]  # the innermost first
    if place := next((f"{file}:{line}" for file, line in frames if Path(file).is_relative_to(program)), None):
        lines.append(f"it was running: {place}")
    return Failure("rank_died", "\n".join(lines), from_outside=event.how == "killed by SIGKILL")


def failure_of(error: BaseException) -> Failure:
    """Classify an exception that a rank raised."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, CommunicationError):
        if error.waiting:
            return Failure("deadlock", first_line(message), waiting=dict(error.waiting))
        kind: Kind = "memory_under_way" if isinstance(error, UnderWayError) else "communication_mismatch"
        return Failure(kind, message, _rank_in(message))
    if isinstance(error, ProgramError):
        return Failure("rank_raises", message, _rank_in(message))
    return Failure("rank_raises", f"{type(error).__name__}: {message}", _rank_in(message))


def _rank_in(message: str) -> int | None:
    _, found, rest = message.partition("rank ")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return int(digits) if found and digits else None


def _partners(program: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """Return the groups and pairs of ranks that communicate; none where a role raises or contradicts itself, which its
    ranks will tell."""
    try:
        stages = list(read_program(program).stages())
        return tuple(groups_of(stages)), tuple(pairs_of(stages))
    except Exception:  # noqa: BLE001 - the text of a role may raise anything
        return (), ()


def run_processes(
    task: Task, ranks: int, backend: str, timeout: float, server: ForkServer | None = None
) -> tuple[RankResult, ...] | Failure:
    """A process per rank, on a GPU each where there are some. A failure is looked at again on the simulator, which
    knows which call of which rank does not match."""
    groups, pairs = _partners(task.program)  # made before the program runs, as they are for training
    job = JobSpecification(
        "verify.programs.execution.record_rank_steps:run_rank",
        ranks,
        {"task": task},
        backend=backend,
        devices=tuple(devices_of(ranks)),
        groups=groups,
        pairs=pairs,
    )
    found = run_job(job, timeout, server)
    if not isinstance(found, Failure):
        return found
    if found.kind in ("communication_mismatch", "deadlock"):
        again = run_simulator(task, ranks, timeout)
        if not isinstance(again, Failure):
            # the program is sound, so it was the machine: too slow, or a connection that broke
            return replace(found, from_outside=True)
        return again if again.kind != "timed_out" else found
    return found


def run_job(job: JobSpecification, timeout: float, server: ForkServer | None) -> tuple[Any, ...] | Failure:
    """Run a job for at most `timeout` seconds, on processes of the server, or of one of its own; return the results."""
    with contextlib.ExitStack() as stack:
        server = server or stack.enter_context(start_server())
        outcome = launch(job, timeout=timeout, stall=min(STALL, timeout / 2), server=server)
    return tuple(outcome.results()) if outcome.end == "finished" else failure_of_job(outcome)


def start_server() -> ForkServer:
    """Start a process from which ranks start quickly; it imports what they need while this process goes on.

    torch imports its symbolic shapes at the first backward pass: better once here than in every rank.
    """
    return ForkServer(preload=("verify.programs.execution.record_rank_steps", "torch.fx.experimental.symbolic_shapes"))


def devices_of(ranks: int) -> list[str]:
    """Return a device for each rank; several ranks share a GPU where there are fewer."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{rank % count}" if count else "cpu" for rank in range(ranks)]


def failure_of_job(outcome: JobOutcome) -> Failure:
    """Classify the end of a job that failed. Raises NnscalerError `cannot_write` where a rank's disk was full."""
    waiting = {rank.rank: rank.waiting for rank in outcome if rank.status == "blocked"}
    if outcome.end == "deadlock":
        return Failure("deadlock", "no rank can go on", waiting=waiting)
    if outcome.end == "timeout":
        return Failure("timed_out", outcome.describe(), waiting=waiting)
    failed = outcome.first_failure
    assert failed is not None, outcome.end
    if failed.errno in NO_ROOM:
        raise no_room(None, os.strerror(failed.errno))
    error = failed.error or ""
    if failed.status == "died":
        return Failure("rank_died", f"rank {failed.rank}: {error}", failed.rank, from_outside="SIGKILL" in error)
    name, _, message = error.partition(": ")
    if name == "UnderWayError":
        return Failure("memory_under_way", message, failed.rank, waiting)
    if name == "CommunicationError":
        return Failure("communication_mismatch", message, failed.rank, waiting)
    return Failure("rank_raises", message if name == "ProgramError" else error, failed.rank)
