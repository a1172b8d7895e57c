"""Log the calls of ranks that are processes, and read the logs in the parent.

Each call is written to the rank's file before it is made, so that it is known however the process ends. Two ranks that
disagree are found by comparing the files: the n-th call of a group is the same on all its ranks.
"""

from __future__ import annotations

import pickle
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.collective_semantics import GroupKey, disagreement_of
from verify.external.ranks.run_result import RankCall

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
