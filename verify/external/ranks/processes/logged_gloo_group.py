"""Groups over gloo in a process that is one rank, and the log of its calls, which the parent reads.

Log the calls of ranks that are processes, and read the logs in the parent.

Each call is written to the rank's file before it is made, so that it is known however the process ends. Two ranks that
disagree are found by comparing the files: the n-th call of a group is the same on all its ranks.

Groups over gloo in a process that is one rank: calls are written down, and waiting is told, before they are made.
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.jobs.job import StatusWriter
from verify.external.ranks.call_sites import place_of_call
from verify.external.ranks.collective_semantics import CollectiveShare, GroupKey, disagreement_of
from verify.external.ranks.process_group_base import AllWorks, RankGroup, Real
from verify.external.ranks.run_result import RankCall
from verify.external.ranks.torch_private import Store, gloo_group
from verify.external.ranks.unwaited_async_calls import BegunWork

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Entry:
    """One call of a rank.

    key    of the group
    call   that was made
    given  bytes
    """

    key: GroupKey
    call: CommunicationCall
    given: int


class CallWriter:
    """A rank's own file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, entry: Entry) -> None:
        data = pickle.dumps((entry.key, entry.call, entry.given))
        self._file.write(_LENGTH.pack(len(data)) + data)


class CallReader:
    """The files of all ranks, read while they are written."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [path.open("rb") for path in paths]
        self._rest = [b""] * len(paths)
        self.entries: list[list[Entry]] = [[] for _ in paths]
        self._collectives: dict[tuple[GroupKey, int], tuple[int, CommunicationCall]] = {}
        self._counts: dict[tuple[GroupKey, int], int] = defaultdict(int)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self) -> tuple[str, int, CommunicationCall] | None:
        """Read what is new. Return how two ranks disagree, the second of them and its call; None if none do."""
        found = None
        for rank, file in enumerate(self._files):
            data = self._rest[rank] + file.read()
            while len(data) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
                if len(data) < end:
                    break
                entry = Entry(*pickle.loads(data[_LENGTH.size : end]))
                data = data[end:]
                self.entries[rank].append(entry)
                found = found or self._compare(rank, entry)
            self._rest[rank] = data
        return found

    def calls(self) -> tuple[tuple[RankCall, ...], ...]:
        """Return the calls of each rank."""
        return tuple(tuple(RankCall.of(e.call, e.given) for e in entries) for entries in self.entries)

    def undelivered(self) -> list[str]:
        """Say which messages nobody has asked for."""
        open_receives: dict[object, list[int]] = defaultdict(list)
        for entries in self.entries:
            for entry in entries:
                if entry.call.kind == "recv":
                    open_receives[entry.key, entry.call.ranks[1], entry.call.key].append(entry.call.ranks[0])
        lost = []
        for source, entries in enumerate(self.entries):
            for entry in entries:
                if entry.call.kind != "send":
                    continue
                receives = open_receives[entry.key, entry.call.ranks[1], entry.call.key]
                chosen = next((sender for sender in receives if sender in (source, -1)), None)
                if chosen is None:
                    lost.append(f"  never received: {entry.call}")
                else:
                    receives.remove(chosen)
        return lost

    def _compare(self, rank: int, entry: Entry) -> tuple[str, int, CommunicationCall] | None:
        if entry.call.kind in ("send", "recv"):
            return None
        number = self._counts[entry.key, rank]
        self._counts[entry.key, rank] = number + 1
        other, first = self._collectives.setdefault((entry.key, number), (rank, entry.call))
        text = disagreement_of(number, other, first, rank, entry.call)
        return None if text is None else (text, rank, entry.call)


# Groups.


class Reporter:
    """Tells the parent what this rank does."""

    def __init__(self, calls: CallWriter, status: StatusWriter) -> None:
        self._calls = calls
        self._status = status
        self._main = threading.get_ident()

    def computing(self) -> None:
        """Tell that the function has begun."""
        self._status.computing()

    def finished(self) -> None:
        """Tell that the function has ended."""
        self._status.finished()

    def call(self, entry: Entry) -> None:
        """Write a call down."""
        self._calls.write(entry)

    @contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        """Tell that the rank waits, while it is inside. Of its other threads nothing is told."""
        if threading.get_ident() != self._main:
            yield
            return
        self._status.communicating(str(what))
        try:
            yield
        finally:
            self._status.computing()


class GlooWork(BegunWork):
    """A work of gloo, of which is told that somebody waits for it. `finish` runs once, after the first wait."""

    def __init__(self, reporter: Reporter, what: object, work: Any, results: Sequence[Tensor], finish: Any) -> None:
        super().__init__(results)
        self._reporter = reporter
        self._what = what
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.reached()
        if self._work.is_completed():
            self._work.wait()
        else:
            with self._reporter.waiting(self._what):
                self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        self.reached()
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        self.reached()
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class GlooGroup(RankGroup):
    """A group over gloo."""

    def __init__(self, reporter: Reporter, options: Any, members: tuple[int, ...]) -> None:
        place, name = options.group_rank, str(options.group_id)
        super().__init__(name, place, members)
        self._reporter = reporter
        with reporter.waiting(f"the start of a group over ranks {members} at {place_of_call()}"):
            self._real = gloo_group(options.store, place, len(members), options.timeout)

    def begin_collective(self, part: CollectiveShare, root: int | None, options: Any, real: Real) -> Any:
        self._reporter.call(Entry(self.key, part.call, part.given_bytes))
        name, *given = real
        arguments, finish = _without_graph(given), None
        if part.call.reduction.startswith("premul_sum"):  # gloo has none: the terms are multiplied here
            options.reduceOp = dist.ReduceOp.SUM
            arguments, finish = _premultiplied(part, arguments)
        if name == "allgather" and len({tuple(t.shape) for item in part.outputs for t in item}) > 1:
            return self._gather_uneven(part)
        # some of gloo's calls wait by themselves, for all that the rank has to send
        with self._reporter.waiting(part.call):
            work = getattr(self._real, name)(*arguments, *([] if options is None else [options]))
        return GlooWork(self._reporter, part.call, work, [t for item in part.outputs for t in item], finish)

    def _gather_uneven(self, part: CollectiveShare) -> AllWorks:
        """Begin to gather tensors of different sizes, which gloo itself refuses and other backends do."""
        works = []
        for given, targets in zip(part.inputs, part.outputs, strict=True):
            targets[self.place].data.copy_(given[0])
            for place, target in enumerate(targets):
                with self._reporter.waiting(part.call):
                    work = self._real.broadcast(target, place)
                works.append(GlooWork(self._reporter, part.call, work, [target], None))
        return AllWorks(works)

    def begin_message(self, call: CommunicationCall, tensor: Tensor, peer: int, tag: int) -> GlooWork:
        sends = call.kind == "send"
        self._reporter.call(Entry(self.key, call, tensor.numel() * tensor.element_size() if sends else 0))
        with self._reporter.waiting(call):
            if sends:
                work = self._real.send([tensor], peer, tag)
            elif peer < 0:
                work = self._real.recv_anysource([tensor], tag)
            else:
                work = self._real.recv([tensor], peer, tag)
        return GlooWork(self._reporter, call, work, [tensor], None)

    def shutdown(self) -> None:
        self._real.shutdown()


def _without_graph(arguments: Any) -> Any:
    """Return the same memory without autograd: gloo divides by the number of ranks on a thread of its own, which would
    be recorded as a part of the program there, as no other backend does, and free what Python holds."""
    if isinstance(arguments, torch.Tensor):
        return arguments.detach() if arguments.requires_grad else arguments
    return [_without_graph(one) for one in arguments] if isinstance(arguments, list | tuple) else arguments


def _premultiplied(part: CollectiveShare, arguments: list[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Return the arguments of a call with its inputs multiplied by the factor of the reduction."""
    with torch.no_grad():
        if part.call.kind != "reduce_scatter":  # in place: what it was is overwritten in any case
            for item in part.inputs:
                item[0].data.mul_(part.factor)
            return arguments, None
        return [arguments[0], _multiplied(arguments[1], part.factor)], None


def _multiplied(given: Any, factor: float | Tensor) -> Any:
    if isinstance(given, Tensor):
        return given.detach() * factor
    return [_multiplied(inside, factor) for inside in given]


class ReportedStore(Store):  # type: ignore[misc]
    """The store of a run, of which is told that a rank waits for a key."""

    def __init__(self, store: Any, reporter: Reporter) -> None:
        super().__init__()
        self._store = store
        self._reporter = reporter

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with self._reporter.waiting(f"store.get({key}) at {place_of_call()}"):
            return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._reporter.waiting(f"store.wait({', '.join(keys)}) at {place_of_call()}"):
            self._store.wait(list(keys))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing to do: the parent ends a rank that waits for ever."""

    def clone(self) -> ReportedStore:
        return ReportedStore(self._store, self._reporter)
