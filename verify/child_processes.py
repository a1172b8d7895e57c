"""Tasks in child processes, so that one that aborts, or hangs, ends alone: many (`run_forked`), or one (`run_apart`).

Children are forked from this process, with everything that it has imported. Each takes one task at a time; when it
dies, or is killed because its time is up, a fresh one takes the next. What a task was doing is kept in memory that
parent and child share, written before it is done, so that it survives the child. No child outlives the parent.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, TypeVar

import torch

from nnscaler.atomic_writes import machine_error, save_tensors
from nnscaler.errors import NnscalerError
from nnscaler.runtime.jobs.load_adjusted_clock import FairClock
from nnscaler.runtime.jobs.rank_process import die_with_parent, leave_stopping_to_parent
from nnscaler.runtime.start_autograd import start_autograd

Result = TypeVar("Result")
Note = Callable[[str], None]  # told what runs, before it runs
Task = Callable[[Note], Result]

_NOTE_BYTES = 4096
LASTING = "NNSCALER_LASTING_FOLDER"  # a variable of children: the temporary folder for what outlives them
_PATIENCE = 60.0  # seconds for a task that does nothing
_TICK = 0.25  # seconds between two looks at what runs


@dataclass(frozen=True)
class Done(Generic[Result]):
    """Task `index` returned. `seconds`: how long it took."""

    index: int
    result: Result
    seconds: float = 0.0


@dataclass(frozen=True)
class Died:
    """The process ended while it ran a task.

    index    of the task
    status   as of `os.waitpid`
    note     the last step that the task announced
    seconds  that the task had run
    trace    Python's stack at that moment, innermost first; empty where the process ended by itself
    """

    index: int
    status: int
    note: str
    seconds: float = 0.0
    trace: str = ""

    @property
    def how(self) -> str:
        """`killed by SIGABRT`, or `exited with code 3`."""
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            return f"killed by {signal.Signals(number).name}"
        return f"exited with code {os.WEXITSTATUS(self.status)}"


@dataclass(frozen=True)
class TimedOut:
    """Task `index` was still running after `seconds`, and was killed; `note` and `trace`: what it was doing."""

    index: int
    note: str
    seconds: float
    trace: str = ""

    @property
    def how(self) -> str:
        """`still running after 60 s`."""
        return f"still running after {self.seconds:.0f} s"


@dataclass(frozen=True)
class Raised:
    """Task `index` raised. `text` is its traceback."""

    index: int
    error: Exception
    text: str
    seconds: float = 0.0


Event = Done[Result] | Died | TimedOut | Raised


def why_not_fork() -> str | None:
    """Return why tasks cannot run in child processes of this one; None if they can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this system has no fork"
    if sys.platform == "darwin":
        return "macOS libraries do not survive a fork"
    if torch.cuda.is_initialized():
        return "CUDA is initialised, and does not survive a fork"
    (event,) = run_forked([lambda note: None], 1, _PATIENCE)
    if not isinstance(event, Done):
        return "torch's autograd has started threads in this process, and does not survive a fork"
    return None


def run_tasks(
    tasks: Sequence[Task[Result]], workers: int, timeout: float, started: Note | None = None, wall: float = math.inf
) -> Generator[Event[Result], None, None]:
    """Yield every task's event as `run_forked` does; where this process cannot fork, as `run_here` does."""
    yield from run_here(tasks) if why_not_fork() else run_forked(tasks, workers, timeout, started, wall)


def run_here(tasks: Sequence[Task[Result]]) -> Iterator[Event[Result]]:
    """Run one task after the other, in this process: nothing protects it."""
    for index, task in enumerate(tasks):
        started = time.perf_counter()
        try:
            result = task(lambda text: None)
        except Exception as error:  # noqa: BLE001 - the caller decides what it means
            yield Raised(index, error, traceback.format_exc(), time.perf_counter() - started)
            continue
        yield Done(index, result, time.perf_counter() - started)


def run_forked(
    tasks: Sequence[Task[Result]], workers: int, timeout: float, started: Note | None = None, wall: float = math.inf
) -> Iterator[Event[Result]]:
    """Yield every task's event, in the order in which they come, from up to `workers` children.

    `timeout`: seconds for one task, by a FairClock; `wall`: by the clock on the wall, for those who have no
    more patience. `started` is told "3" when task 3 starts. Closing the iterator ends all children.
    """
    pool: list[_Worker[Result]] = []
    waiting = iter(range(len(tasks)))
    left = len(tasks)
    folder = tempfile.TemporaryDirectory(prefix="nnscaler-tasks-", ignore_cleanup_errors=True)
    try:
        while left:
            idle = [worker for worker in pool if worker.index is None]
            while (idle or len(pool) < workers) and (index := next(waiting, None)) is not None:
                if not idle:
                    idle.append(_Worker(tasks, pool, folder.name))
                    pool.append(idle[0])
                idle.pop().give(index)
                if started is not None:
                    started(str(index))
            wait([worker.connection for worker in pool if worker.index is not None], _TICK)
            for worker in [w for w in pool if w.index is not None]:
                event = worker.look(timeout, wall)
                if event is None:
                    continue
                left -= 1
                if worker.ended:
                    pool.remove(worker)
                yield event
    finally:
        for worker in pool:
            worker.end()
        folder.cleanup()


class _Worker(Generic[Result]):
    """A child process, as the parent sees it. `index`: the task that it has."""

    def __init__(self, tasks: Sequence[Task[Result]], others: Sequence[_Worker[Result]], folder: str) -> None:
        self.index: int | None = None
        self.since = 0.0
        self.clock: FairClock | None = None
        self.ended = False
        self.last = ("", 0.0, "")  # note, seconds and trace when it ended
        self.memory = mmap.mmap(-1, _NOTE_BYTES)  # anonymous and shared
        self.trace = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self.connection, theirs = multiprocessing.Pipe()

        def work() -> None:
            _settle(self.trace.fileno(), folder)
            _serve(tasks, theirs, self.memory)

        self.pid = fork_child(work, [self.connection, *(other.connection for other in others)])
        theirs.close()

    def give(self, index: int) -> None:
        self.index, self.since, self.clock = index, time.perf_counter(), FairClock(self.pid)
        self.memory[:4] = (0).to_bytes(4, "little")
        with suppress(OSError):  # it has just died: the next look tells
            self.connection.send(index)

    def note(self) -> str:
        length = int.from_bytes(self.memory[:4], "little")
        return self.memory[4 : 4 + length].decode("utf-8", "replace")

    def look(self, timeout: float, wall: float) -> Event[Result] | None:
        """Return the event that ended the child's task, and None while it is still running."""
        index = self.index
        assert index is not None
        seconds = time.perf_counter() - self.since
        try:
            if self.connection.poll():
                result, error, text = self.connection.recv()
                self.index = None
                return Done(index, result, seconds) if error is None else Raised(index, error, text, seconds)
        except (EOFError, OSError):
            status = self.end(patience=1.0)  # a pipe closes before its process is gone
            return Died(index, status, *self.last)
        if seconds > wall or (self.clock is not None and self.clock.seconds() > timeout):
            before = os.fstat(self.trace.fileno()).st_size
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGABRT)  # it, and what it has forked, write their stacks
            self.end(patience=1.0, trace_from=before)
            return TimedOut(index, *self.last)
        return None

    def end(self, patience: float = 0.0, trace_from: int | None = None) -> int:
        """End the process and all that it started, wait for it, and return its status.

        `patience`: seconds that it has to end by itself. `trace_from`: where in the file its stack starts; None: the
        last one there.
        """
        if self.ended:
            return 0
        self.ended = True
        note, seconds = self.note(), time.perf_counter() - self.since
        wait_for_end(self.pid, patience)
        with suppress(ProcessLookupError):  # an ended process keeps its number, and its group, until it is waited for
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        self.trace.seek(trace_from or 0)
        trace = self.trace.read().decode("utf-8", "replace")
        if trace_from is None:
            trace = trace.rpartition("Fatal Python error")[2]  # what it had forked may have died before
        self.last = (note, seconds, trace)
        for part in (self.connection, self.memory, self.trace):
            part.close()
        return status


def wait_for_end(pid: int, patience: float) -> None:
    """Wait until a child has ended, or for so many seconds."""
    until = time.perf_counter() + patience
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.perf_counter() < until:
        time.sleep(0.005)


def fork_child(work: Callable[[], None], inherited: Sequence[Connection]) -> int:
    """Fork a process that ends after `work`, or when this one ends; return its number, which is its group's too.

    It leaves Ctrl-C to this process, and closes the ends of pipes that are this process's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: no child waits for one of this process
        process = os.fork()
    if process == 0:
        code = 1
        try:
            with suppress(OSError):
                os.setpgid(0, 0)  # what it starts ends with it
            die_with_parent(parent)
            for connection in inherited:
                connection.close()  # or a sibling's pipe would stay open when the parent dies
            leave_stopping_to_parent()
            work()
            code = 0
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
            code = 0
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(code)  # no exit handlers: they are the parent's
    with suppress(OSError):  # the child does the same: whoever is first
        os.setpgid(process, process)
    return process


def _settle(trace: int, folder: str) -> None:
    """Leave the parent's standard output to the parent, and write Python's stack where the parent reads it.

    Its temporary files lie where the parent removes them, however the child ends.
    """
    import resource  # not on every system

    os.environ.setdefault(LASTING, tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    faulthandler.enable(trace, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what the operator prints, in whatever language, is no result
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    start_autograd()


def _serve(tasks: Sequence[Task[Result]], connection: Connection, memory: mmap.mmap) -> None:
    def note(text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")[: _NOTE_BYTES - 4]
        memory[4 : 4 + len(data)] = data
        memory[:4] = len(data).to_bytes(4, "little")

    while True:
        index = connection.recv()
        answer: tuple[Result | None, Exception | None, str]
        try:
            answer = (tasks[index](note), None, "")
        except SystemExit as stop:  # the operator ends its process: as os._exit does
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        except Exception as error:  # noqa: BLE001 - the parent decides what it means
            answer = (None, _portable(error), traceback.format_exc())
        try:
            connection.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as problem:
            connection.send((None, RuntimeError(f"the result cannot be sent: {problem}"), answer[2]))


def _portable(error: Exception) -> Exception:
    """Return the error, if it can cross to another process; else one with its words."""
    return error if isinstance(error, NnscalerError) else RuntimeError(f"{type(error).__name__}: {error}")


def can_run_apart() -> bool:
    """Return whether tasks can run in child processes: not where there are GPUs.

    There a backward pass starts threads that do not survive a fork.
    """
    return why_not_fork() is None and not torch.cuda.is_available()


def run_apart(task: Callable[[], Result], timeout: float) -> Result | Died | TimedOut:
    """Run `task` in a child process and return its result, which torch must be able to save.

    Runs in this process where no child can be started. Changes that `task` makes to memory are lost. Raises the
    exceptions of `task`: NnscalerError unchanged, any other as RuntimeError.
    """
    if not can_run_apart():
        return task()
    with tempfile.TemporaryDirectory(prefix="nnscaler-apart-") as folder:
        file = Path(folder) / "result.pt"  # a file, for torch sends tensors through memory that ends with the child

        def work(_: Note) -> None:
            found = task()
            try:
                save_tensors(found, file)
            except Exception as error:
                raise machine_error(error) or error from error

        (event,) = run_forked([work], 1, timeout)
        if isinstance(event, Died | TimedOut):
            return event
        if isinstance(event, Raised):
            event.error.add_note(event.text)
            raise event.error
        found: Result = torch.load(file, weights_only=False)
        return found
