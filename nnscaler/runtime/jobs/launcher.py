"""Run a function as the ranks of a job on this machine: real processes, watched until all have ended.

No process outlives `launch`: on the first failure, a time-out, a deadlock or an interrupt every rank is killed and
reaped, and when the launching process is killed its ranks go with it. A deadlock is seen from the ranks' own reports:
all unfinished ranks are inside a communication call and none of them has got on for some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from nnscaler.runtime.communication.join_process_group import local_environment
from nnscaler.runtime.jobs.job import (
    Activity,
    JobDirectory,
    JobEnd,
    JobOutcome,
    JobSpecification,
    LaunchError,
    RankOutcome,
    RankState,
    RankStatus,
    StatusReader,
    create_status_file,
    log_tail,
)
from nnscaler.runtime.jobs.load_adjusted_clock import FairClock

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nnscaler.runtime.jobs.fork_server import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))"
)
_START_LIMIT = 120.0  # seconds for the fork server to import torch, by a FairClock
_CAUSE_LIMIT = 2.0  # seconds to wait for the failure behind a lost connection, by a FairClock
_KILL_LIMIT = 60.0  # seconds, on the wall, for the end of what was killed

_ACTIVITY: Mapping[Activity, RankState] = {
    Activity.STARTING: "starting",
    Activity.COMPUTING: "running",
    Activity.COMMUNICATING: "blocked",
    Activity.FINISHED: "finished",
}


class ForkServer:
    """A process that has imported torch, from which jobs start quickly. It starts to import when this is made.

    Use it as a context manager, or call `close`; it ends with this process in any case. `preload`: further modules
    that every rank needs. One job at a time.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nnscaler-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._log = self.folder / "server.log"
        self._buffer = b""
        self._is_ready = False
        self._connection, theirs = socket.socketpair()
        arguments = [json.dumps(_module_path()), str(theirs.fileno()), str(os.getpid()), json.dumps(list(preload))]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: no folder of the user before the standard library while the module path is not yet ours
                [sys.executable, "-P", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=local_environment(),
                start_new_session=True,  # ^C in a terminal reaches the launcher, which ends the job in order
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the server and the ranks that it still runs."""
        self._connection.close()
        if not self._is_ready:  # it would hear of it only after all its imports
            self._process.kill()
        try:
            self._process.wait(_KILL_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Wait until the server has imported torch. Raises LaunchError when it does not start."""
        if not self._is_ready:
            clock = FairClock(self._process.pid)
            while not self._is_ready and clock.seconds() < _START_LIMIT:
                self._is_ready = any(e["event"] == "ready" for e in self.events(1.0))
            if not self._is_ready:
                raise LaunchError(f"the fork server did not start within {_START_LIMIT:.0f} s\n{log_tail(self._log)}")

    def send(self, command: Mapping[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(command).encode() + b"\n")
        except OSError:
            raise LaunchError(f"the fork server has ended\n{log_tail(self._log)}") from None

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the server's messages of up to `timeout` seconds, as soon as there are any.

        Raises LaunchError if it ended.
        """
        ready, _, _ = select.select([self._connection], [], [], timeout)
        if not ready:
            return []
        try:
            data = self._connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise LaunchError(f"the fork server has ended\n{log_tail(self._log)}")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _module_path() -> list[str]:
    """Return the module path of this process for another one: the entry "" means the current folder."""
    return list(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path))


def launch(
    specification: JobSpecification,
    *,
    timeout: float,
    stall: float | None = None,
    log_dir: str | Path | None = None,
    server: ForkServer | None = None,
) -> JobOutcome:
    """Run a job, and return the outcome of each of its ranks.

    timeout      seconds for the whole job; stall: seconds without progress that make a deadlock (min(20, timeout / 2));
                 both of a FairClock, which stands while ranks wait for a processor
    log_dir      folder for the ranks' output, rank_<n>.log each; without it only its end is kept, in the outcome
    server       to start from; without, one is started for this job (a second or two)

    Failures of ranks are in the outcome. Raises LaunchError when the job cannot be started.
    """
    specification.check()
    world_size = specification.world_size
    with contextlib.ExitStack() as stack:
        used = server if server is not None else stack.enter_context(ForkServer())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="job-", dir=used.folder)))
        job = JobDirectory(folder)
        job.write_specification(specification)
        create_status_file(job.status, world_size)
        logs = folder if log_dir is None else Path(log_dir).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        used.wait_until_ready()
        watch = _JobWatch(used, job, [logs / f"rank_{rank}.log" for rank in range(world_size)])
        outcome = watch.run(timeout, min(20.0, timeout / 2) if stall is None else stall)
    if log_dir is None:
        outcome = replace(outcome, ranks=tuple(replace(r, log=None) for r in outcome.ranks))
    return outcome


class _JobWatch:
    """Follows one job from its start to the end of its last process."""

    def __init__(self, server: ForkServer, job: JobDirectory, logs: Sequence[Path]) -> None:
        self._server = server
        self._job = job
        self._logs = logs
        self._exits: dict[int, tuple[int, float]] = {}  # rank -> exit code and time
        self._progress = dict.fromkeys(range(len(logs)), (-1, 0.0))  # rank -> status sequence, and since when

    def run(self, timeout: float, stall: float) -> JobOutcome:
        begin, clock = time.monotonic(), FairClock(self._server.process_id)
        with contextlib.closing(StatusReader(self._job.status)) as status:
            # read while the ranks live: what they are doing when the job is ended is what the outcome tells
            seen: dict[int, RankStatus] = {}
            try:
                self._server.send(
                    {
                        "command": "start",
                        "job": str(self._job.path),
                        "logs": [str(log) for log in self._logs],
                        "folder": str(Path.cwd()),
                        "path": _module_path(),
                    }
                )
                end = self._follow(status, clock, timeout, stall)
                seen = {rank: status.read(rank) for rank in range(len(self._logs))}
            finally:
                self._end()
        ranks = tuple(self._outcome(rank, seen[rank]) for rank in range(len(self._logs)))
        return JobOutcome(ranks, end, time.monotonic() - begin)

    def _follow(self, status: StatusReader, clock: FairClock, timeout: float, stall: float) -> JobEnd:
        """Wait for the end of the job, and return how it ended."""
        while len(self._exits) < len(self._logs):
            self._listen(0.1)
            if any(code != 0 for code, _ in self._exits.values()):
                self._wait_for_cause()
                return "failed"
            now = clock.seconds()
            deadlock = self._is_stalled(status, now, stall)
            if deadlock or now > timeout:
                self._server.send({"command": "dump"})
                self._listen(0.3)
                return "deadlock" if deadlock else "timeout"
        return "finished"

    def _listen(self, timeout: float) -> None:
        for event in self._server.events(timeout):
            if event["event"] == "exit":
                self._exits[event["rank"]] = (event["code"], event["time"])

    def _wait_for_cause(self) -> None:
        """Wait for the failure behind a lost connection: a rank whose peer is gone may be heard of before that peer."""
        clock = FairClock(self._server.process_id)
        while clock.seconds() < _CAUSE_LIMIT and len(self._exits) < len(self._logs):
            failures = [self._ended(rank) for rank, (code, _) in self._exits.items() if code != 0]
            if any(f is not None and not f.secondary for f in failures):
                self._listen(0.05)  # ranks that failed at the same time
                return
            self._listen(0.1)

    def _is_stalled(self, status: StatusReader, now: float, stall: float) -> bool:
        blocked, unfinished = 0, 0
        for rank, (sequence, since) in self._progress.items():
            current = status.read(rank)
            if current.sequence != sequence:
                self._progress[rank] = (current.sequence, now)
                since = now
            if current.activity is not Activity.FINISHED:
                unfinished += 1
                blocked += current.activity is Activity.COMMUNICATING and now - since >= stall
        return 0 < unfinished == blocked

    def _end(self) -> None:
        """Kill the processes that still run, and return when every process of the job is gone."""
        gone, limit = set(self._exits), time.monotonic() + _KILL_LIMIT
        with contextlib.suppress(LaunchError):  # a server that has ended took its ranks with it
            if len(gone) < len(self._logs):
                self._server.send({"command": "stop"})
            while len(gone) < len(self._logs) and time.monotonic() < limit:
                gone |= {event["rank"] for event in self._server.events(0.2) if event["event"] == "exit"}

    def _ended(self, rank: int) -> RankOutcome | None:
        code, ended = self._exits.get(rank, (None, 0.0))
        return self._job.outcome(rank, code, ended, self._logs[rank])

    def _outcome(self, rank: int, status: RankStatus) -> RankOutcome:
        ended = self._ended(rank)
        if ended is not None:
            return replace(ended, waiting=status.text)
        log = self._logs[rank]
        return RankOutcome(rank, _ACTIVITY[status.activity], waiting=status.text, log=log, log_tail=log_tail(log))
