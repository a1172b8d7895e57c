"""The activity of each rank of a local job, in a file that the rank writes through memory and its launcher reads.

A rank reports before and after each communication call; that costs microseconds, needs no cooperation of the reader,
and the last report of a hung or killed rank stays readable. One slot of fixed size per rank.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_SLOT = 1024
_HEAD = struct.Struct("<QBH")  # sequence, activity, length of the text


class Activity(IntEnum):
    STARTING = 0  # the function of the rank has not begun
    COMPUTING = 1
    COMMUNICATING = 2
    FINISHED = 3  # the function has returned


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last report of a rank.

    sequence   changes with every report
    activity   of the rank
    text       describes the last communication call
    """

    sequence: int
    activity: Activity
    text: str


class StatusWriter:
    """One rank's slot of the file. The sequence is odd while the slot is being written."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = rank * _SLOT
        self._sequence = 0
        self._length = 0

    def communicating(self, text: str) -> None:
        """Report that the rank enters a communication call that `text` describes."""
        data = text.encode("utf-8")[: _SLOT - _HEAD.size]
        self._length = len(data)
        start = self._offset + _HEAD.size
        _HEAD.pack_into(self._memory, self._offset, self._sequence + 1, Activity.COMMUNICATING, 0)
        self._memory[start : start + len(data)] = data
        self._write(Activity.COMMUNICATING)

    def computing(self) -> None:
        """Report that the rank left the call. Its text stays."""
        self._write(Activity.COMPUTING)

    def finished(self) -> None:
        self._write(Activity.FINISHED)

    def _write(self, activity: Activity) -> None:
        self._sequence += 2
        _HEAD.pack_into(self._memory, self._offset, self._sequence, activity, self._length)


def create_status_file(path: Path, world_size: int) -> None:
    """Create a file in which every rank is STARTING."""
    path.write_bytes(bytes(_SLOT * world_size))


class StatusReader:
    """Reads the slots of a file that `create_status_file` made, while ranks write."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, rank: int) -> RankStatus:
        """Return the slot of `rank`; a report that is being written at this moment is read as it is."""
        offset = rank * _SLOT
        for _ in range(3):
            sequence, activity, length = _HEAD.unpack_from(self._memory, offset)
            data = self._memory[offset + _HEAD.size : offset + _HEAD.size + length]
            if sequence % 2 == 0 and _HEAD.unpack_from(self._memory, offset)[0] == sequence:
                break
        return RankStatus(sequence, Activity(activity), data.decode("utf-8", "replace"))

    def close(self) -> None:
        self._memory.close()
