"""A communicator that notes when each call and each instruction starts and ends: what events are measured from.

It stands before another communicator, so that a run which records nothing pays nothing. The clock is monotonic and
the same for all processes of a machine. On a GPU a call may return before it is done: times are those of the host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nnscaler.records import decode, encode
from nnscaler.runtime.communication.communicator import (
    CommunicationCall,
    Communicator,
    Key,
    Pending,
    ProgramError,
    Shape,
)

T = TypeVar("T")


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


class RecordingCommunicator:
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

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], reduction: str = "sum") -> Tensor:
        return self._timed(lambda: self._made.all_reduce(tensor, ranks, reduction))

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        return self._timed(lambda: self._made.all_gather(tensor, ranks, shapes))

    def reduce_scatter(self, pieces: Sequence[Tensor], ranks: Sequence[int], reduction: str = "sum") -> Tensor:
        return self._timed(lambda: self._made.reduce_scatter(pieces, ranks, reduction))

    def all_to_all(
        self, pieces: Sequence[Tensor], ranks: Sequence[int], shapes: Sequence[Sequence[Shape]] | None = None
    ) -> list[Tensor]:
        return self._timed(lambda: self._made.all_to_all(pieces, ranks, shapes))

    def rotate(self, tensor: Tensor, ranks: Sequence[int], shapes: Sequence[Shape] | None = None) -> Tensor:
        return self._timed(lambda: self._made.rotate(tensor, ranks, shapes))

    def broadcast(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> Tensor:
        return self._timed(lambda: self._made.broadcast(tensor, source, ranks))

    def barrier(self, ranks: Sequence[int]) -> None:
        self._timed(lambda: self._made.barrier(ranks))

    def send(self, tensor: Tensor, destination: int, key: Key) -> None:
        self._timed(lambda: self._made.send(tensor, destination, key))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, key: Key) -> Tensor:
        return self._timed(lambda: self._made.recv(shape, dtype, source, key))

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int]) -> Pending:
        return self._started(lambda: self._made.start_all_reduce(tensor, ranks))

    def start_all_gather(
        self, tensor: Tensor, into: Sequence[Tensor], ranks: Sequence[int], shapes: Sequence[Shape] | None = None
    ) -> Pending:
        return self._started(lambda: self._made.start_all_gather(tensor, into, ranks, shapes))

    def start_reduce_scatter(self, pieces: Sequence[Tensor], into: Tensor, ranks: Sequence[int]) -> Pending:
        return self._started(lambda: self._made.start_reduce_scatter(pieces, into, ranks))

    def start_recv(self, into: Tensor, source: int, key: Key) -> Pending:
        return self._started(lambda: self._made.start_recv(into, source, key))

    def together(self, lasting: bool = False) -> AbstractContextManager[None]:
        return self._made.together(lasting)

    def settle(self) -> None:
        self._made.settle()

    def finish(self) -> None:
        self._made.finish()

    def at(self, place: str | None) -> AbstractContextManager[None]:
        return self._made.at(place)

    def _timed(self, call: Callable[[], T]) -> T:
        start = time.monotonic()
        found = call()
        end = time.monotonic()
        made = self._made.current
        assert made is not None, "every call is recorded"
        self._note(made, start, end)
        return found

    def _started(self, call: Callable[[], Pending]) -> Pending:
        """Begin a call, which is noted when it has been waited for: under what waits, from its begin to its end."""
        start = time.monotonic()
        pending = call()

        def finish() -> None:
            waits = time.monotonic()
            pending.wait()
            end = time.monotonic()
            self._note(pending.call, start, end, hidden=waits - start)

        return Pending(pending.call, finish, {})

    def _note(self, made: CommunicationCall, start: float, end: float, hidden: float | None = None) -> None:
        size = 0 if made.dtype is None else handed_over(made) * made.dtype.itemsize
        name = made.context if self._since is None else self._since[0]
        dtype = str(made.dtype).removeprefix("torch.") if made.dtype is not None else ""
        self.events.append(RecordedEvent(made.kind, start, end, name, made.ranks, size, dtype, hidden))
