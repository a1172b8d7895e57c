"""Handle Ctrl-C and SIGTERM so that a command ends in order: what it made is removed, and what it started ends.

Both raise a KeyboardInterrupt in the main thread. A parent that ignores SIGINT, such as a shell that runs a script's
background job, hands that on to its children; a command does not take that over. Imports only the standard library:
this holds before anything heavy is imported.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

PATIENCE = 5.0  # seconds in which a second Ctrl-C does not break into the cleaning up after the first


class Terminated(KeyboardInterrupt):
    """SIGTERM: what cleans up after Ctrl-C cleans up after it as well."""


def stop_in_order() -> Callable[[], KeyboardInterrupt | None]:
    """Make SIGINT raise KeyboardInterrupt and SIGTERM Terminated from here on. To be called by the main thread of a
    process that is a command.

    Returns a function that tells the first of them, None without one: the exception may be lost on its way, in a
    finaliser of Python's, a callback of a library or the user's own code, and the exit code must still say it.
    """
    stopped = -PATIENCE
    first: KeyboardInterrupt | None = None

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal stopped, first
        before, stopped = stopped, time.monotonic()
        kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        first = first or kind()
        if stopped - before >= PATIENCE:
            raise kind

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    atexit.register(_ignore_signals)
    return lambda: first


def _ignore_signals() -> None:
    """The last that runs before the interpreter takes its handlers away: a second signal would kill the process there,
    and its exit code would be that of the kill."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def tell_end(stop: KeyboardInterrupt) -> int:
    """Say by what the process ends, and return the exit code. Of a rank, the command that started it says why."""
    from nnscaler.training.run_ranks_as_processes import STORE

    if STORE not in os.environ:
        print("terminated" if isinstance(stop, Terminated) else "interrupted", file=sys.stderr)
    return exit_code_of(stop)


def exit_code_of(stop: KeyboardInterrupt) -> int:
    """Return what a shell calls the end by this signal."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
