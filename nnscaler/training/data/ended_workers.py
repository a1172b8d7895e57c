"""Tell of a worker process of a loader that was killed, where its batches are read.

torch tells of one by a handler of SIGCHLD, which raises wherever the main thread then is: within a backward, or while
another error is told. Where the loader's own process reads what the worker had still to give, the connection is gone.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line

_HELP = (
    "the system kills one where memory is short (`dmesg` says so): fewer workers, or rows that take less; or its code, "
    "or a library's, ends the process: data.workers = 0 reads in the run's own, where an error has a line"
)
_OF_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([^)]*)\) (.*)")


class _ChildEnded:
    """A handler of SIGCHLD: what torch's raises is kept until batches are read.

    reading  batches are being read: there it is raised
    told     what torch's has raised elsewhere
    """

    def __init__(self, before: Any) -> None:
        self._before = before
        self.reading = False
        self.told: RuntimeError | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except RuntimeError as error:
            if self.reading:
                raise
            self.told = error


def read_from_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a loader with workers, which have started.

    Raises NnscalerError("data_raised") where one was killed, or ended by itself.
    """
    handler, end = _handler(), object()
    while True:
        try:
            handler.reading = True
            if handler.told is not None:
                told, handler.told = handler.told, None
                raise told
            batch = next(batches, end)
        except (RuntimeError, OSError, EOFError) as error:
            handler.reading = False
            if (message := _told(batches, error)) is None:
                raise
            handler.told = None
            raise NnscalerError("data_raised", message, help=_HELP) from error
        finally:
            handler.reading = False
        if batch is end:
            return
        yield batch


def _handler() -> _ChildEnded:
    """Return the process's handler, which takes the place of torch's; one that nobody calls outside of its main thread,
    where torch sets none."""
    found = signal.getsignal(signal.SIGCHLD)
    if isinstance(found, _ChildEnded):
        return found
    made = _ChildEnded(found)
    if callable(found) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, made)
    return made


def _told(batches: Any, error: Exception) -> str | None:
    """Return what to say of the error that reading raised; None where no worker has ended."""
    said = _OF_WORKER.match(first_line(error))
    if said is not None:
        return f"reading the data: a worker process (pid {said[1]}) {said[2]}"
    if isinstance(error, RuntimeError):
        return None
    for worker in getattr(batches, "_workers", ()):
        worker.join(1.0)  # what was lost is the connection: the process is about to be gone
        if worker.exitcode:
            how = f"was killed by {signal.Signals(-worker.exitcode).name}" if worker.exitcode < 0 else "ended"
            return f"reading the data: a worker process (pid {worker.pid}) {how}"
    return None
