"""A job of the local launcher: the directory through which launcher and ranks talk, and its outcome.

job.pt            what to run: written by the launcher, read by every rank
store             where the ranks find each other
status            what each rank is doing (`status`)
result_<rank>.pt  what the function returned, or
error_<rank>.json what it raised

Results are files because tensors that travel through shared memory need a process that outlives the job.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import torch

from nnscaler.exception_in_one_line import system_error_behind
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError

# The activity of each rank of a local job, in a file that the rank writes through memory and its launcher reads.
# A rank reports before and after each communication call; that costs microseconds, needs no cooperation of the
# reader, and the last report of a hung or killed rank stays readable. One slot of fixed size per rank.

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

    def communicating(self, call: object) -> None:
        """Report that the rank enters a communication call, in its words."""
        data = str(call).encode("utf-8")[: _SLOT - _HEAD.size]
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


RankState = Literal["finished", "raised", "died", "blocked", "running", "starting"]
_MUTE = 74  # exit code of a rank that had no room to write its error

JobEnd = Literal["finished", "failed", "timeout", "deadlock"]


class LaunchError(ProgramError):
    """A job could not be started, or its results were asked for although it failed."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The end of one rank.

    status      "finished"; "raised" an exception; "died" by a signal or an exit; or, when the job was ended from
                outside (another rank failed, time-out, deadlock), its activity then: "blocked" in a communication
                call, "running" other code, "starting"
    result      returned by the function
    error       one line: the exception, or how the process died
    traceback   of the exception
    waiting     the communication call in which it was, or the last one before that
    secondary   whether it raised only because a peer had gone
    errno       of the operating system's error behind the exception: a full disk, say
    log         the file with the rank's output, if the caller named a directory
    log_tail    the end of its output
    time        seconds of a monotonic clock at which it ended
    """

    rank: int
    status: RankState
    result: Any = None
    error: str | None = None
    traceback: str = ""
    waiting: str = ""
    secondary: bool = False
    errno: int | None = None
    log: Path | None = None
    log_tail: str = ""
    time: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in ("raised", "died")


@dataclass(frozen=True, slots=True)
class JobOutcome(Sequence[RankOutcome]):
    """The ranks of a job in order, and its end.

    ranks     one outcome each
    end       "finished", "failed" (a rank raised or died), "timeout", or "deadlock" (every unfinished rank waited in a
              communication call and none got on)
    seconds   from start to end
    """

    ranks: tuple[RankOutcome, ...]
    end: JobEnd
    seconds: float

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: Any) -> Any:
        return self.ranks[index]

    def __iter__(self) -> Iterator[RankOutcome]:
        return iter(self.ranks)

    @property
    def ok(self) -> bool:
        return self.end == "finished"

    @property
    def first_failure(self) -> RankOutcome | None:
        """The rank that failed first and not because of another one."""
        failed = sorted((r for r in self.ranks if r.failed), key=lambda r: (r.secondary, r.time))
        return failed[0] if failed else None

    def results(self) -> list[Any]:
        """Return the ranks' results. Raises CommunicationError for a deadlock, else LaunchError when the job failed."""
        if self.end == "deadlock":
            waiting = {r.rank: r.waiting for r in self.ranks if r.status == "blocked"}
            raise CommunicationError(self.describe(), waiting=waiting)
        if not self.ok:
            raise LaunchError(self.describe())
        return [r.result for r in self.ranks]

    def describe(self) -> str:
        """Say how the job ended and what each unfinished rank was doing, for people."""
        if self.ok:
            return f"{len(self.ranks)} ranks finished in {self.seconds:.1f} s"
        failure = self.first_failure
        if failure is not None:
            lines = [f"rank {failure.rank} {failure.status}: {failure.error}"]
            lines += [f"  log: {failure.log}"] if failure.log is not None else []
            return "\n".join(lines)
        head = "deadlock: no rank can go on" if self.end == "deadlock" else f"time-out after {self.seconds:.1f} s"
        return "\n".join([head, *(f"  rank {r.rank} {_activity(r)}" for r in self.ranks)])


def _activity(outcome: RankOutcome) -> str:
    if outcome.status == "blocked":
        return f"waits in {outcome.waiting}"
    if outcome.status == "running" and outcome.waiting:
        return f"was running; its last communication call was {outcome.waiting}"
    return {"running": "was running and had made no communication call", "starting": "was starting"}.get(
        outcome.status, outcome.status
    )


@dataclass(frozen=True, slots=True)
class JobSpecification:
    """The call of `function(communicator, **kwargs)` on every rank.

    target        "package.module:function" or "file.py:function"
    world_size    number of ranks
    kwargs        of the function, picklable
    rank_kwargs   by rank, added to `kwargs`
    backend       of torch.distributed
    devices       by rank; without, the CPU
    groups        of ranks, see `torch_communicator`
    pairs         of ranks, see `torch_communicator`
    """

    target: str
    world_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank_kwargs: tuple[Mapping[str, Any], ...] = ()
    backend: str = "gloo"
    devices: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    def device_of(self, rank: int) -> str:
        """Return the device of a rank."""
        return self.devices[rank] if self.devices else "cpu"

    def check(self) -> None:
        """Raise LaunchError where there are no ranks, or not a device or arguments for each."""
        ranks, devices, arguments = self.world_size, len(self.devices) or self.world_size, len(self.rank_kwargs)
        if ranks < 1 or devices != ranks or arguments not in (0, ranks):
            raise LaunchError(f"{ranks} ranks, {devices} devices, {arguments} sets of arguments")


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The files of a job."""

    path: Path

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def status(self) -> Path:
        return self.path / "status"

    def write_specification(self, specification: JobSpecification) -> None:
        """Write `job.pt`. Raises LaunchError when an argument cannot be pickled."""
        fields = {name: getattr(specification, name) for name in JobSpecification.__slots__}
        try:
            with (self.path / "job.pt").open("wb") as file:
                torch.save(fields, file)
        except Exception as error:
            message = f"the arguments of {specification.target} cannot be sent to other processes: {error}"
            raise LaunchError(message) from error

    def read_specification(self) -> JobSpecification:
        # memory-mapped: the ranks of a machine share the pages of a large state
        return JobSpecification(**torch.load(self.path / "job.pt", mmap=True, weights_only=False))

    def write_result(self, rank: int, result: Any) -> None:
        temporary = self.path / f"result_{rank}.new"
        with temporary.open("wb") as file:  # by a path, torch would hide why the disk refuses
            torch.save(result, file)
        temporary.rename(self.path / f"result_{rank}.pt")

    def write_error(self, rank: int, error: BaseException) -> int:
        """Write the error of a rank, and return the exit code of the process."""
        text = f"{type(error).__name__}: {error}"
        record = {
            "error": text,
            "traceback": "".join(traceback.format_exception(error)),
            "secondary": bool(getattr(error, "secondary", False)),
            "errno": getattr(system_error_behind(error), "errno", None),
            "time": time.monotonic(),
        }
        temporary = self.path / f"error_{rank}.new"
        try:
            temporary.write_text(json.dumps(record), encoding="utf-8")
            temporary.rename(self.path / f"error_{rank}.json")
        except OSError:
            return _MUTE
        return 1

    def outcome(self, rank: int, exit_code: int | None, ended: float, log: Path) -> RankOutcome | None:
        """Read the outcome of a rank from its files and exit code; None when it has neither finished nor failed."""
        error, result = self.path / f"error_{rank}.json", self.path / f"result_{rank}.pt"
        tail = log_tail(log)
        if error.exists():
            return RankOutcome(rank, "raised", log=log, log_tail=tail, **json.loads(error.read_text(encoding="utf-8")))
        if exit_code not in (None, 0):
            assert exit_code is not None
            full = errno.ENOSPC if exit_code == _MUTE else None
            return RankOutcome(rank, "died", None, _death(exit_code), errno=full, log=log, log_tail=tail, time=ended)
        if result.exists():
            value = torch.load(result, map_location="cpu", weights_only=False)
            return RankOutcome(rank, "finished", value, log=log, log_tail=tail, time=ended)
        return None


def log_tail(log: Path, size: int = 4000) -> str:
    """Return the end of a rank's log; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def _death(exit_code: int) -> str:
    if exit_code == _MUTE:
        return "the process could not write what it had to say: the disk is full"
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code}"
    import signal

    try:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"the process was killed by signal {-exit_code}"
