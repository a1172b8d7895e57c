"""Tell of long waits of a rank for others: of a call that the others do not make, nothing else is ever heard."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from nnscaler.is_user_file import is_users

AFTER = 60.0  # seconds
_HERE = Path(__file__).parent


class LongWaits:
    """A Reporter that tells of each call which takes long, with the user's line that led to it. A thread looks, and
    ends with this object.

    Calls of the thread that made it are looked at: those of others end before it waits for them.
    """

    def __init__(self, rank: int, after: float = AFTER, write: Callable[[str], None] | None = None) -> None:
        self._rank, self._after = rank, after
        self._write = write or _to_standard_error
        self._thread = threading.get_ident()
        self._waiting: tuple[float, object] | None = None  # since when, for what
        threading.Thread(target=_look, args=(weakref.ref(self), after / 4), name="long waits", daemon=True).start()

    def communicating(self, call: object) -> None:
        """Note that the rank enters a communication call."""
        if threading.get_ident() == self._thread:
            self._waiting = time.monotonic(), call

    def computing(self) -> None:
        """Note that it has left the call."""
        if threading.get_ident() == self._thread:
            self._waiting = None

    def tell(self) -> None:
        """Tell of the call that the rank is in, where it is in one for long; once."""
        waiting = self._waiting
        if waiting is None or time.monotonic() - waiting[0] < self._after:
            return
        self._waiting = None
        frame = sys._current_frames().get(self._thread)
        if frame is None or not _communicates(frame):  # it has ended with an error
            return
        text = f"rank {self._rank} has waited {self._after:.0f} s for other ranks: {waiting[1]}"
        self._write(f"{text}{_users_line(frame)}. Each rank must make the same calls of the engine, in the same order")


def _communicates(frame: FrameType) -> bool:
    """Say if a frame is in a communicator, or in what one calls."""
    return any(Path(f.f_code.co_filename).parent == _HERE for f, _ in walk_stack(frame))


def _users_line(frame: FrameType) -> str:
    """Return the innermost line of the user's that a frame comes from, after a comma; empty where there is none."""
    files = ((f.f_code.co_filename, line) for f, line in walk_stack(frame))
    file, line = next(((file, line) for file, line in files if is_users(file)), ("", 0))
    return f", called by {file}:{line} `{linecache.getline(file, line).strip()}`" if file else ""


def _to_standard_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _look(waits: weakref.ref[LongWaits], every: float) -> None:
    while True:
        time.sleep(every)
        held = waits()
        if held is None:
            return
        held.tell()
        del held
