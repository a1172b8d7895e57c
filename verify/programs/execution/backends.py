"""Run a program: on threads of this process, or as processes over gloo or NCCL."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from nnscaler.files import NO_ROOM, no_room
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs.fair_clock import join_within
from nnscaler.runtime.jobs.job import JobOutcome, JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.runtime.program.program_directory import groups_of, pairs_of, read_program
from verify.processes.pool import Died, TimedOut
from verify.processes.subprocess_isolation import run_apart
from verify.programs.execution.failure import Failure
from verify.programs.execution.rank_program import RankResult, Task, run_rank

STALL = 6.0  # seconds in which no rank gets on, all of them waiting, that make a deadlock
GRACE = 10.0  # seconds after its time that the simulator has to say that it is up
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
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
    if observe is not None or not apart:
        return _simulate(task, ranks, timeout, observe)
    found = run_apart(lambda: _simulate(task, ranks, timeout), timeout + GRACE)
    return failure_of_process(found, task.program) if isinstance(found, Died | TimedOut) else found


def failure_of_process(event: Died | TimedOut, program: str) -> Failure:
    """Classify the end of the process of all ranks, which left no result."""
    if isinstance(event, TimedOut):
        return Failure("timed_out", f"{event.seconds:.0f} s on the simulator")
    lines = [f"{event.how} (the process of all ranks, on the simulator)"]
    frames = [m.group("file", "line") for m in _FRAME.finditer(event.trace)]  # the innermost first
    if place := next((f"{file}:{line}" for file, line in frames if Path(file).is_relative_to(program)), None):
        lines.append(f"it was running: {place}")
    return Failure("rank_died", "\n".join(lines), from_outside=event.how == "killed by SIGKILL")


def _simulate(
    task: Task, ranks: int, timeout: float, observe: Observe | None = None
) -> tuple[RankResult, ...] | Failure:
    outcome: list[tuple[RankResult, ...] | Failure] = []
    simulator = Simulator(ranks)

    def observer(rank: int) -> Callable[[int, int, str, str, torch.Tensor], None] | None:
        if observe is None:
            return None
        return lambda stage, micro, phase, name, tensor: observe(rank, stage, micro, phase, name, tensor)

    def work() -> None:
        try:
            results = simulator.run(lambda c: run_rank(c, task, observer(c.rank)))
            outcome.append(tuple(results))
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises (SystemExit too) is what we look for
            outcome.append(failure_of(error))

    thread = threading.Thread(target=work, name="simulator", daemon=True)
    thread.start()
    join_within(thread, timeout)
    if not outcome:
        simulator.stop()
        return Failure("timed_out", f"{timeout:g} s on the simulator")
    return outcome[0]


def failure_of(error: BaseException) -> Failure:
    """Classify an exception that a rank raised."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, CommunicationError):
        if error.waiting:
            return Failure("deadlock", message.splitlines()[0], waiting=dict(error.waiting))
        return Failure("communication_mismatch", message, _rank_in(message))
    if isinstance(error, ProgramError):
        return Failure("rank_raises", message, _rank_in(message))
    return Failure("rank_raises", f"{type(error).__name__}: {message}", _rank_in(message))


def _rank_in(message: str) -> int | None:
    _, found, rest = message.partition("rank ")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return int(digits) if found and digits else None


def run_processes(
    task: Task, ranks: int, backend: str, timeout: float, server: ForkServer | None = None
) -> tuple[RankResult, ...] | Failure:
    """A process per rank, on a GPU each where there are some. A failure is looked at again on the simulator, which
    knows which call of which rank does not match."""
    # NCCL's groups are made before the program runs; gloo needs none
    stages = list(read_program(task.program).stages()) if backend == "nccl" else []
    with contextlib.ExitStack() as stack:
        job = JobSpecification(
            "verify.programs.execution.rank_program:run_rank",
            ranks,
            {"task": task},
            backend=backend,
            devices=tuple(devices_of(ranks)),
            groups=tuple(groups_of(stages)),
            pairs=tuple(pairs_of(stages)),
        )
        server = server or stack.enter_context(start_server())
        outcome = launch(job, timeout=timeout, stall=min(STALL, timeout / 2), server=server)
    if outcome.end == "finished":
        return tuple(outcome.results())
    failure = failure_of_job(outcome)
    if failure.kind in ("communication_mismatch", "deadlock"):
        again = run_simulator(task, ranks, timeout)
        if not isinstance(again, Failure):
            # the program is sound, so it was the machine: too slow, or a connection that broke
            return replace(failure, from_outside=True)
        return again if again.kind != "timed_out" else failure
    return failure


def start_server() -> ForkServer:
    """Start a process from which ranks start quickly; it imports what they need while this process goes on.

    torch imports its symbolic shapes at the first backward pass: better once here than in every rank.
    """
    return ForkServer(preload=("verify.programs.execution.rank_program", "torch.fx.experimental.symbolic_shapes"))


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
    if name == "CommunicationError":
        return Failure("communication_mismatch", message, failed.rank, waiting)
    return Failure("rank_raises", message if name == "ProgramError" else error, failed.rank)
