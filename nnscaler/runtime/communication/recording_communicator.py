"""A communicator that records when each call and each instruction starts and ends: what events are measured from.

It stands before another communicator, so that a run which records nothing pays nothing. The clock is monotonic and
the same for all processes of a machine. On a GPU a call may return before it is done: times are those of the host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from nnscaler.records_as_json import decode, encode
from nnscaler.runtime.communication.communicator import (
    CommunicationCall,
    Communicator,
    Pending,
    ProgramError,
)

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One activity of a rank, with its begin and end.

    kind         of the call; "run" for an instruction, or what the executor does beside those
    start, end   by the clock, in seconds
    instruction  that ran, as the executor names it: "F0.1", "the sum of the loss"
    ranks        of a call: the group; (source, destination) for messages
    bytes        that this rank hands to the call, or receives as a message; where the call lists the shapes of the
                 whole group, those of the rank that hands over most
    dtype        of what travels
    hidden       of what was begun, and waited for later: the seconds in which the rank did something else; None: it
                 waited at once
    """

    kind: str
    start: float
    end: float
    instruction: str
    ranks: tuple[int, ...] = ()
    bytes: int = 0
    dtype: str = ""
    hidden: float | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The activities of one rank in one step, in the order in which they ended."""

    rank: int
    events: tuple[RecordedEvent, ...]


def handed_over(call: CommunicationCall) -> int:
    """Return the elements that a rank gives to a call; of the rank that gives most, where the call lists those of the
    whole group."""
    elements, ranks = [prod(shape) for shape in call.shapes], len(call.ranks)
    if call.kind in ("all_gather", "rotate") and len(elements) == ranks:
        return max(elements)
    if call.kind == "all_to_all" and len(elements) == ranks * ranks:
        return max(sum(elements[i * ranks : (i + 1) * ranks]) for i in range(ranks))
    return sum(elements)


def write_records(folder: Path, rank: int, events: Sequence[RecordedEvent]) -> None:
    """Write what a rank recorded of one step into a folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _file_of(rank)).write_text(json.dumps(encode(RankRecord(rank, tuple(events)))) + "\n", encoding="utf-8")


def read_records(folder: Path, ranks: int) -> list[tuple[RecordedEvent, ...]]:
    """Return what each of so many ranks wrote. Raises ProgramError, which names the file."""
    if (folder / _file_of(ranks)).exists():
        raise ProgramError(f"{folder} has records of more than {ranks} ranks")
    found: list[tuple[RecordedEvent, ...]] = []
    for rank in range(ranks):
        file = folder / _file_of(rank)
        try:
            found.append(decode(RankRecord, json.loads(file.read_text(encoding="utf-8"))).events)
        except OSError:
            raise ProgramError(f"{folder} has no {file.name}: {ranks} ranks write a file each") from None
        except ValueError as error:  # a RecordError too
            raise ProgramError(f"{file} is no record of a rank: {error}") from None
    return found


def _file_of(rank: int) -> str:
    return f"rank{rank}.json"


def _timed(method: Callable[Concatenate[Communicator, P], T]) -> Callable[Concatenate[RecordingCommunicator, P], T]:
    """Return the method that notes a call of this one."""

    def call(self: RecordingCommunicator, /, *args: P.args, **named: P.kwargs) -> T:
        start = time.monotonic()
        found: T = getattr(self._made, method.__name__)(*args, **named)
        end = time.monotonic()
        made = self._made.current
        assert made is not None, "every call is recorded"
        self._note(made, start, end)
        return found

    return call


def _begun(
    method: Callable[Concatenate[Communicator, P], Pending],
) -> Callable[Concatenate[RecordingCommunicator, P], Pending]:
    """Return the method that begins this one's call, which is noted when it has been waited for: under what waits, from
    its begin to its end."""

    def call(self: RecordingCommunicator, /, *args: P.args, **named: P.kwargs) -> Pending:
        start = time.monotonic()
        pending: Pending = getattr(self._made, method.__name__)(*args, **named)

        def finish() -> None:
            waits = time.monotonic()
            pending.wait()
            end = time.monotonic()
            self._note(pending.call, start, end, hidden=waits - start)

        return Pending(pending.call, finish, {})

    return call


def _passed_on(method: Callable[Concatenate[Communicator, P], T]) -> Callable[Concatenate[RecordingCommunicator, P], T]:
    """Return the method that makes a call of this one, and notes nothing."""

    def call(self: RecordingCommunicator, /, *args: P.args, **named: P.kwargs) -> T:
        found: T = getattr(self._made, method.__name__)(*args, **named)
        return found

    return call


class RecordingCommunicator(Communicator):
    """Makes the calls of `communicator`, and appends them to `events`, which its user reads and clears."""

    def __init__(self, communicator: Communicator) -> None:
        self._made = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.events: list[RecordedEvent] = []
        self._since: tuple[str, float] | None = None  # the instruction that runs, and its start

    def begin(self) -> None:
        """Forget what was noted so far, when all ranks are here: what comes starts together. Every rank calls this."""
        self._made.barrier(tuple(range(self.world_size)))
        self.events.clear()

    @property
    def context(self) -> str:
        return self._made.context

    @context.setter
    def context(self, what: str) -> None:
        """Hand on what the executor runs. It is noted from its beginning to the empty text at its end; what is named
        more precisely in between is still the same."""
        if self._since is None and what:
            self._since = (what, time.monotonic())
        elif self._since is not None and not what:
            name, start = self._since
            self.events.append(RecordedEvent("run", start, time.monotonic(), name))
            self._since = None
        self._made.context = what

    @property
    def current(self) -> CommunicationCall | None:
        return self._made.current

    @current.setter
    def current(self, call: CommunicationCall | None) -> None:
        self._made.current = call

    @property
    def listener(self) -> Callable[[CommunicationCall], None] | None:
        return self._made.listener

    @listener.setter
    def listener(self, listener: Callable[[CommunicationCall], None] | None) -> None:
        self._made.listener = listener

    all_reduce = _timed(Communicator.all_reduce)
    all_gather = _timed(Communicator.all_gather)
    reduce_scatter = _timed(Communicator.reduce_scatter)
    all_to_all = _timed(Communicator.all_to_all)
    rotate = _timed(Communicator.rotate)
    broadcast = _timed(Communicator.broadcast)
    barrier = _timed(Communicator.barrier)
    send = _timed(Communicator.send)
    recv = _timed(Communicator.recv)
    start_all_reduce = _begun(Communicator.start_all_reduce)
    start_all_gather = _begun(Communicator.start_all_gather)
    start_reduce_scatter = _begun(Communicator.start_reduce_scatter)
    start_recv = _begun(Communicator.start_recv)
    together = _passed_on(Communicator.together)
    receives_ahead = _passed_on(Communicator.receives_ahead)
    let_go = _passed_on(Communicator.let_go)
    settle = _passed_on(Communicator.settle)
    finish = _passed_on(Communicator.finish)
    at = _passed_on(Communicator.at)

    def _note(self, made: CommunicationCall, start: float, end: float, hidden: float | None = None) -> None:
        size = 0 if made.dtype is None else handed_over(made) * made.dtype.itemsize
        name = made.context if self._since is None else self._since[0]
        dtype = str(made.dtype).removeprefix("torch.") if made.dtype is not None else ""
        self.events.append(RecordedEvent(made.kind, start, end, name, made.ranks, size, dtype, hidden))
