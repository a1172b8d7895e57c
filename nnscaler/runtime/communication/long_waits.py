"""Tell of long waits of a rank for others: of a call that the others do not make, nothing else is ever heard.

Ranks that wait say so to each other. Two that wait in unlike calls of one group, each its so-and-so-manieth there, wait
for ever, and are told soon; whoever waits for one that computes, or is stopped, is told when it has taken long.
"""

from __future__ import annotations

import json
import linecache
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Protocol, TypeGuard

from nnscaler.is_user_file import is_users
from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.communication.torch_communicator_base import agreement_of

AFTER = 60.0  # seconds
UNLIKE = 4.0  # seconds after which a rank says to others in which call it waits
_HERE = Path(__file__).parent


class Store(Protocol):
    """Numbers and texts that all ranks read and write, such as a torch.distributed.Store."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class LongWaits:
    """A Reporter that tells of each call which takes long, with the user's line that led to it. A thread looks, and
    ends with this object.

    Calls of the thread that made it are looked at: those of others end before it waits for them. `store`: through which
    ranks say to each other where they wait; None: each looks at itself alone.
    """

    def __init__(
        self,
        rank: int,
        after: float = AFTER,
        write: Callable[[str], None] | None = None,
        store: Store | None = None,
        unlike: float = UNLIKE,
    ) -> None:
        self._rank, self._after, self._unlike = rank, after, unlike
        self._write, self._store = write or _to_standard_error, store
        # What a rank has said stays in the store, and a communicator that is made later counts its calls anew.
        self._own = 0 if store is None else store.add(f"communicators of {rank}", 1)
        self._thread = threading.get_ident()
        self._waiting: tuple[float, object] | None = None  # since when, for what
        self._made: Counter[tuple[int, ...]] = Counter()  # collectives by group that were waited for at once
        every = min(after, unlike) / 4
        threading.Thread(target=_look, args=(weakref.ref(self), every), name="long waits", daemon=True).start()

    def communicating(self, call: object) -> None:
        """Note that the rank enters a communication call."""
        if threading.get_ident() == self._thread:
            if _is_met(call):
                self._made[call.ranks] += 1
            self._waiting = time.monotonic(), call

    def computing(self) -> None:
        """Note that it has left the call."""
        if threading.get_ident() == self._thread:
            self._waiting = None

    def tell(self) -> None:
        """Tell of the call that the rank is in, where it is in one for long; once."""
        waiting = self._waiting
        waited = 0.0 if waiting is None else time.monotonic() - waiting[0]
        if waiting is None or waited < min(self._unlike, self._after):
            return
        frame = sys._current_frames().get(self._thread)
        if frame is None or not _communicates(frame):  # it has ended with an error
            self._waiting = None
            return
        where = f"{waiting[1]}{_users_line(frame)}"
        told = self._unlike_call(waiting[1], where) if waited >= self._unlike else None
        if told is None and waited >= self._after:
            told = f"rank {self._rank} has waited {self._after:.0f} s for other ranks: {where}"
        if told is not None:
            self._waiting = None
            self._write(f"{told}. Each rank must make the same calls of the engine, in the same order")

    def _unlike_call(self, call: object, where: str) -> str | None:
        """Say to the others in which call this rank waits; return what to tell where one waits in an unlike one, and
        this rank is the first of the group."""
        if self._store is None or not _is_met(call):
            return None
        number, agreed = self._made[call.ranks], agreement_of(call)
        others = [r for r in call.ranks if r != self._rank] if self._rank == min(call.ranks) else []
        found: list[tuple[int, Any]] = []
        try:
            self._store.set(self._key(self._rank), json.dumps([list(call.ranks), number, agreed, where]))
            waiting = [other for other in others if self._store.check([self._key(other)])]
            found += [(other, json.loads(self._store.get(self._key(other)))) for other in waiting]
        except RuntimeError:  # of a store that has gone with its process
            self._store = None
        for other, (ranks, its_number, its_agreed, its_where) in found:
            if (ranks, its_number) == (list(call.ranks), number) and its_agreed != agreed:
                here = f"rank {self._rank} in {where}; rank {other} in {its_where}"
                return f"ranks {self._rank} and {other} wait for each other in unlike calls, for ever: {here}"
        return None

    def _key(self, rank: int) -> str:
        return f"waits {self._own} {rank}"


def _is_met(call: object) -> TypeGuard[CommunicationCall]:
    """Say if a call ends when all ranks of its group have made it, and not before."""
    return isinstance(call, CommunicationCall) and not call.begun and call.kind not in ("send", "recv")


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
