"""Watch the processes of ranks from their parent, up to the first failure or until all have returned."""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.jobs.job import Activity, StatusReader
from nnscaler.runtime.jobs.load_adjusted_clock import FairClock
from verify.external.ranks.call_sites import place_in_stack
from verify.external.ranks.processes.logged_gloo_group import CallReader
from verify.external.ranks.run_result import RankCall, RanksFailed

_TICK = 0.05  # seconds between two looks
_STALL = 2.5  # seconds of a FairClock, without progress, that make a deadlock
_IDLE = 0.3  # seconds of processor time a second, below which ranks that wait do nothing else
_ASKED = 0.3  # seconds for ranks to write their stacks
_LOST = 1.5  # seconds to find the cause behind a lost connection
_CUT = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed")


@dataclass(frozen=True)
class RankAnswer:
    """The message of a rank that has finished.

    result    pickled
    error     one line of what it raised; "" where it returned
    trace     the traceback of it, and `place` its line of the program
    unwaited  functional collectives that nobody waited for
    forgotten lines that begin calls for none of which it waited
    """

    result: bytes
    error: str = ""
    trace: str = ""
    place: str | None = None
    unwaited: int = 0
    forgotten: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """True where it raised because another rank was gone."""
        return any(sign in self.error for sign in _CUT)


class ProcessWatch:
    """Follows the ranks of one run from their start to the first failure, or until all have returned."""

    def __init__(self, folder: Path, processes: list[int], connections: list[Connection]) -> None:
        ranks = len(processes)
        self._folder = folder
        self._processes = processes
        self._connections = connections
        self._calls = CallReader([folder / f"calls_{rank}" for rank in range(ranks)])
        self._status = StatusReader(folder / "status")
        self._answers: dict[int, RankAnswer] = {}
        self._died: dict[int, int] = {}  # rank -> wait status
        self._sequences = [0] * ranks
        self._since = 0.0  # when a rank got on last, by the clock
        self._used = 0.0  # processor seconds of all ranks at that time

    def close(self) -> None:
        self._calls.close()
        self._status.close()

    def calls(self) -> tuple[tuple[RankCall, ...], ...]:
        """Return the calls of each rank."""
        return self._calls.calls()

    def follow(self, timeout: float) -> list[RankAnswer]:
        """Return the answers of all ranks. Raises RanksFailed."""
        clock = FairClock(os.getpid())
        ranks = range(len(self._processes))
        while len(self._answers) < len(ranks):
            self._listen()
            self._raise_mismatch()
            self._raise_failure()
            now = clock.seconds()
            if self._is_stalled(now):
                self._raise_mismatch()
                raise self._deadlock()
            if now > timeout:
                raise self._late(timeout)
        self._raise_mismatch()
        lost = self._calls.undelivered()
        if lost:
            raise RanksFailed("communication_mismatch", "\n".join(["messages were never received:", *lost]))
        return [self._answers[rank] for rank in ranks]

    def _listen(self) -> None:
        """Hear what ranks have sent, and which have died, for the length of a tick."""
        open_ones = [c for rank, c in enumerate(self._connections) if rank not in self._answers | self._died]
        for connection in wait(open_ones, _TICK):
            rank = self._connections.index(connection)  # type: ignore[arg-type]
            try:
                self._answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
            except (EOFError, OSError):
                self._died[rank] = os.waitpid(self._processes[rank], 0)[1]

    def _raise_mismatch(self) -> None:
        found = self._calls.read()
        if found is not None:
            text, rank, call = found
            raise RanksFailed("communication_mismatch", text, rank=rank, place=call.place, by_rank=self._by_rank())

    def _raise_failure(self) -> None:
        """Raise for a rank that has died or raised, the cause before those that lost their connection to it."""
        raised = {rank: answer for rank, answer in self._answers.items() if answer.error}
        if not raised and not self._died:
            return
        until = time.monotonic() + _LOST
        while all(a.is_cut for a in raised.values()) and not self._died and time.monotonic() < until:
            self._listen()
            raised = {rank: answer for rank, answer in self._answers.items() if answer.error}
        self._raise_mismatch()  # what gloo makes of calls that do not match
        if self._died:
            rank, status = min(self._died.items())
            how = f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
            how = how or f"ended with exit code {os.WEXITSTATUS(status)}"
            last = self._last(rank)
            where = f"; its last communication call was {last}" if last is not None else ""
            message = f"the process of rank {rank} was {how}{where}"
            stack = self._stack(rank)
            place = place_in_stack(stack) or (last.place if last is not None else None)
            by_rank = {**self._by_rank(), rank: f"died\n{stack}".rstrip()}
            raise RanksFailed("rank_died", message, rank=rank, place=place, by_rank=by_rank)
        rank, answer = min(raised.items(), key=lambda item: (item[1].is_cut, item[0]))
        message = f"rank {rank} raised {answer.error}"
        raise RanksFailed("rank_raises", message, rank=rank, place=answer.place, by_rank=self._by_rank())

    def _is_stalled(self, now: float) -> bool:
        """Tell whether all unfinished ranks wait in a call, and none has got on for some time, nor used a processor."""
        states = [self._status.read(rank) for rank in range(len(self._processes))]
        sequences = [state.sequence for state in states]
        busy = any(state.activity in (Activity.STARTING, Activity.COMPUTING) for state in states)
        if sequences != self._sequences or busy:
            self._sequences, self._since, self._used = sequences, now, self._processor_time()
            return False
        passed = now - self._since
        if passed < _STALL:
            return False
        if self._processor_time() - self._used > _IDLE * passed:  # large tensors that are on their way
            self._since, self._used = now, self._processor_time()
            return False
        return True

    def _processor_time(self) -> float:
        """Return the seconds that the ranks' processes have used; 0 where the system does not tell."""
        ticks = 0
        for process in self._processes:
            try:
                fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _last(self, rank: int) -> CommunicationCall | None:
        entries = self._calls.entries[rank]
        return entries[-1].call if entries else None

    def _by_rank(self) -> dict[int, str]:
        return {rank: self._text(rank) for rank in range(len(self._processes))}

    def _text(self, rank: int) -> str:
        """Say what a rank is doing, or how it ended."""
        if rank in self._died:
            return "died"
        if rank in self._answers and self._answers[rank].error:
            return self._answers[rank].trace
        state, last = self._status.read(rank), self._last(rank)
        if state.activity is Activity.COMMUNICATING:
            return f"waits in {state.text}"
        text = f"; its last communication call was {last}" if last is not None else ""
        return ("finished" if rank in self._answers else "was running") + text

    def _deadlock(self) -> RanksFailed:
        texts = self._by_rank()
        lines = [f"  rank {rank} {text}" for rank, text in texts.items()]
        message = "\n".join(["deadlock: no rank can go on", *lines, *self._calls.undelivered()])
        first = next((rank for rank, text in texts.items() if text.startswith("waits")), None)
        place = texts[first].rpartition(" at ")[2] if first is not None and " at " in texts[first] else None
        return RanksFailed("deadlock", message, rank=first, place=place, by_rank=texts)

    def _late(self, timeout: float) -> RanksFailed:
        texts = self._by_rank()
        running = [rank for rank, text in texts.items() if text.startswith("was running")]
        for rank in running:
            with suppress(OSError):
                os.kill(self._processes[rank], signal.SIGUSR1)
        time.sleep(_ASKED if running else 0.0)
        places = {rank: place_in_stack(self._stack(rank)) for rank in running}
        texts |= {rank: f"{texts[rank]}; it is at {place}" for rank, place in places.items() if place is not None}
        lines = [f"  rank {rank} {text}" for rank, text in texts.items()]
        message = "\n".join([f"ranks were still running after {timeout:.0f} s", *lines])
        first = running[0] if running else None
        place = places[first] if first is not None else None
        return RanksFailed("timed_out", message, rank=first, place=place, by_rank=texts)

    def _stack(self, rank: int) -> str:
        """Return what the rank's Python wrote of its stack; empty where it wrote nothing."""
        try:
            return (self._folder / f"stack_{rank}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
