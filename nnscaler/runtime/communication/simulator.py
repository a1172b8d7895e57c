"""Simulate many ranks in one process: a thread per rank, and a meeting place for their communication.

Nothing here waits by time: a rank that has to wait registers what it waits for, and the rank that registers last when
every unfinished rank waits has found a deadlock. Sums are taken in the order of the group by the rank that arrives
last, so results are equal bitwise on all ranks and in all runs. No more ranks work at once than the machine has cores:
each operator of torch lets go of Python's lock, and all threads that wait for it would take turns at every one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import (
    SUMMED,
    CommunicationCall,
    CommunicationError,
    Communicator,
)
from nnscaler.runtime.communication.simulated_async import Flights
from nnscaler.runtime.communication.torch_communicator_base import reduce_in_order
from nnscaler.runtime.start_autograd import fake_before_threads

T = TypeVar("T")
Contribution = Sequence[Tensor]
Group = tuple[int, ...]
_EXIT = 2.0  # seconds, on the wall, for the system to end a thread that has left Python


class Simulator:
    """`world_size` ranks. Communicators live as long as the simulator: what `run` builds may be used by a later run."""

    def __init__(self, world_size: int, timings: int | None = None) -> None:
        """`timings`: the seed of the moments at which what ranks begin reads and writes memory, as on a machine whose
        links are fast or slow at random; every use of memory under way is then an error. None: it reads at once, and
        writes when it is waited for."""
        self.world_size = world_size
        self._exchange = _SharedState(world_size)
        self.communicators = [SimulatedCommunicator(rank, self._exchange, timings) for rank in range(world_size)]

    def run(self, function: Callable[[SimulatedCommunicator], T]) -> list[T]:
        """Call `function(communicator)` on every rank at once, and return the results by rank.

        Raises the first exception of any rank that is not merely the consequence of another's, or CommunicationError
        for a deadlock, for ranks that disagree on a collective, or for a message that nobody received. After an
        exception the simulator starts afresh.
        """
        fake_before_threads()
        exchange = self._exchange
        exchange.reset()
        results: dict[int, T] = {}

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                # one thread per rank also in backward; and a new thread would not inherit these modes
                with (
                    torch.enable_grad(),
                    torch.autograd.set_multithreading_enabled(False),
                    self.communicators[rank].watching(),
                    exchange.cores,
                ):
                    results[rank] = function(self.communicators[rank])
            except BaseException as error:  # noqa: BLE001 - given to the caller below
                exchange.fail(rank, error)
            else:
                exchange.finish(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt of the caller stops the ranks as well
            exchange.fail(-1, error)
            raise
        await_exit(threads)
        exchange.raise_failure()
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End every rank of a `run` in another thread at its next communication."""
        self._exchange.fail(-1, CommunicationError("the simulator was stopped"))


def await_exit(threads: Iterable[threading.Thread]) -> None:
    """Wait until threads that have ended are gone from the system too, which Linux tells.

    A thread that has left Python frees what libraries keep for it. MKL holds all its locks meanwhile, and a process
    that is forked then finds them locked for ever: its first matrix product spins.
    """
    until = time.monotonic() + _EXIT
    for thread in threads:
        task = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and task.exists() and time.monotonic() < until:
            time.sleep(0.0002)


class _Meeting:
    """One collective of one group: filled by each rank of it, and answered by the last."""

    def __init__(self) -> None:
        self.calls: dict[int, CommunicationCall] = {}
        self.given: dict[int, Contribution] = {}
        self.results: dict[int, list[Tensor]] | None = None


class _SharedState:
    """State that the ranks share. Every attribute is guarded by `lock`, but `cores`, which a rank holds one of while it
    works and gives back while it waits."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.cores = threading.Semaphore(os.cpu_count() or 1)
        self.lock = threading.Lock()
        self.wake = [threading.Condition(self.lock) for _ in range(world_size)]
        self.reset()

    def reset(self) -> None:
        with self.lock:
            self.meetings: dict[tuple[Group, bool, int], _Meeting] = {}
            self.counts: dict[tuple[Group, bool, int], int] = {}  # (group, begun, rank) -> its collectives
            self.mailbox: dict[tuple[Group, tuple[object, ...]], deque[tuple[CommunicationCall, Tensor]]] = {}
            self.waiting: dict[int, CommunicationCall] = {}
            self.awaited: dict[int, _Meeting] = {}
            self.finished: set[int] = set()
            self.failure: BaseException | None = None
            self.failed_rank = -1

    # -- collectives and messages ---------------------------------------------------------------------------------

    def meet(self, rank: int, call: CommunicationCall, given: Contribution) -> list[Tensor]:
        """Wait until all ranks of the group made this call, and return this rank's part of the result."""
        meeting = self.join(rank, call)
        self.give(rank, meeting, given)
        return self.result(rank, call, meeting)

    def join(self, rank: int, call: CommunicationCall) -> _Meeting:
        """Come to the meeting that this call is in, and compare it with those of ranks that came before."""
        group = tuple(sorted(call.ranks))
        with self.lock:
            self._check_alive(rank, call)
            number = self.counts.get((group, call.begun, rank), 0)
            self.counts[group, call.begun, rank] = number + 1
            place = (group, call.begun, number)
            meeting = self.meetings.setdefault(place, _Meeting())
            for other, other_call in meeting.calls.items():
                if reason := disagreement(call, other_call):
                    error = CommunicationError(f"{reason}:\n  rank {other}: {other_call}\n  rank {rank}: {call}")
                    self._fail(rank, error)
                    raise error
            meeting.calls[rank] = call
            if len(meeting.calls) == len(group):
                del self.meetings[place]
            return meeting

    def give(self, rank: int, meeting: _Meeting, given: Contribution) -> None:
        """Give this rank's part, once; the rank that gives last makes the results of all."""
        call = meeting.calls[rank]
        with self.lock:
            meeting.given[rank] = given
            if len(meeting.given) < len(call.ranks):
                return
        results = _answer(call, meeting.given)  # outside the lock: other groups go on meanwhile
        with self.lock:
            meeting.results = results
            for other in call.ranks:
                if self.awaited.get(other) is meeting:
                    self.waiting.pop(other, None)
                    self.wake[other].notify()

    def result(self, rank: int, call: CommunicationCall, meeting: _Meeting) -> list[Tensor]:
        """Wait until all ranks of the group gave their parts, and return this rank's result."""
        with self.lock:
            if meeting.results is None:
                self.awaited[rank] = meeting
                self._wait(rank, call, lambda: meeting.results is not None)
                del self.awaited[rank]
            assert meeting.results is not None
            return meeting.results[rank]

    def send(self, rank: int, call: CommunicationCall, tensor: Tensor) -> None:
        with self.lock:
            self._check_alive(rank, call)
            self.mailbox.setdefault((call.ranks, call.key), deque()).append((call, tensor))
            destination = call.ranks[1]
            expected = self.waiting.get(destination)
            if expected is not None and expected.kind == "recv" and _address(expected) == _address(call):
                del self.waiting[destination]
                self.wake[destination].notify()

    def receive(self, rank: int, call: CommunicationCall) -> Tensor:
        address = _address(call)
        with self.lock:
            self._check_alive(rank, call)
            if address not in self.mailbox:
                self._wait(rank, call, lambda: address in self.mailbox)
            messages = self.mailbox[address]
            sent, tensor = messages.popleft()
            if not messages:
                del self.mailbox[address]
            if sent.shapes != call.shapes or sent.dtype != call.dtype:
                sender = sent.ranks[0]
                error = CommunicationError(
                    f"a message differs from what its receiver expects:\n  rank {sender}: {sent}\n  rank {rank}: {call}"
                )
                self._fail(rank, error)
                raise error
            return tensor

    # -- waiting and failing --------------------------------------------------------------------------------------

    def _wait(self, rank: int, call: CommunicationCall, ready: Callable[[], bool]) -> None:
        self.waiting[rank] = call
        self._look_for_deadlock()
        self.cores.release()
        while self.failure is None and not ready():
            self.wake[rank].wait()
        self.lock.release()  # those who hold cores need it to give them back
        self.cores.acquire()
        self.lock.acquire()
        self.waiting.pop(rank, None)
        if not ready():
            self._check_alive(rank, call)

    def _look_for_deadlock(self) -> None:
        unfinished = self.world_size - len(self.finished)
        if self.failure is None and unfinished and len(self.waiting) == unfinished:
            waiting = {rank: str(call) for rank, call in sorted(self.waiting.items())}
            lines = [f"  rank {rank} waits in {text}" for rank, text in waiting.items()]
            if self.finished:
                lines.append(f"  finished: ranks {sorted(self.finished)}")
            self._fail(-1, CommunicationError("\n".join(["deadlock: no rank can go on", *lines]), waiting=waiting))

    def _check_alive(self, rank: int, call: CommunicationCall) -> None:
        if self.failure is not None:
            cause = f"rank {self.failed_rank} failed" if self.failed_rank >= 0 else "all ranks were stopped"
            raise CommunicationError(f"rank {rank} stopped in {call} because {cause}", secondary=True)

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure, self.failed_rank = error, rank
            for condition in self.wake:
                condition.notify()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            self.finished.add(rank)
            self._fail(rank, error)

    def finish(self, rank: int) -> None:
        with self.lock:
            self.finished.add(rank)
            self._look_for_deadlock()

    def raise_failure(self) -> None:
        with self.lock:
            if self.failure is not None:
                raise self.failure
            for messages in self.mailbox.values():
                call, _ = messages[0]
                raise CommunicationError(f"a message was never received: rank {call.ranks[0]}: {call}")


def _address(call: CommunicationCall) -> tuple[Group, tuple[object, ...]]:
    return call.ranks, call.key


def disagreement(call: CommunicationCall, other: CommunicationCall) -> str | None:
    """Describe how the calls of two ranks of one group differ; None if they make the same call."""
    if call.kind != other.kind:
        return "ranks of one group call different collectives"
    if call.ranks != other.ranks:
        return "ranks of one group order it differently"
    if call.reduction != other.reduction:
        return "ranks of one group reduce differently"
    if call.source != other.source:
        return "ranks of one group broadcast from different ranks"
    if call.dtype != other.dtype:
        return "ranks of one group give different dtypes"
    if call.begun and call.context != other.context and SUMMED in call.context:
        return "ranks of one group sum gradients of different parameters"
    if call.shapes != other.shapes:
        return "ranks of one group give different shapes"
    return None


def _answer(call: CommunicationCall, given: dict[int, Contribution]) -> dict[int, list[Tensor]]:
    """Compute the result of a collective for each rank. No tensor shares memory with another one."""
    ranks = call.ranks
    if call.kind == "all_reduce":
        total = reduce_in_order([given[r][0] for r in ranks], call.reduction)
        return {r: [total if r == ranks[0] else total.clone()] for r in ranks}
    if call.kind == "all_gather":
        return {r: [given[s][0].clone() for s in ranks] for r in ranks}
    if call.kind == "reduce_scatter":
        return {r: [reduce_in_order([given[s][i] for s in ranks], call.reduction)] for i, r in enumerate(ranks)}
    if call.kind == "all_to_all":
        return {r: [given[s][i].clone() for s in ranks] for i, r in enumerate(ranks)}
    if call.kind == "rotate":
        return {r: [given[ranks[i - 1]][0].clone()] for i, r in enumerate(ranks)}
    if call.kind == "broadcast":
        assert call.source is not None
        return {r: [given[call.source][0].clone()] for r in ranks}
    assert call.kind == "barrier", call
    return {r: [] for r in ranks}


class SimulatedCommunicator(Communicator):
    """One rank of a `Simulator`."""

    def __init__(self, rank: int, exchange: _SharedState, timings: int | None) -> None:
        super().__init__(rank, exchange.world_size)
        self._exchange = exchange
        self._flights = Flights(rank, timings)

    def watching(self) -> AbstractContextManager[object]:
        """Return what a rank runs inside of."""
        self._begun.clear()
        return self._flights.watching()

    def _record(self, kind: str, *given: Any, **named: Any) -> CommunicationCall:
        self._flights.pass_time(blocking=kind != "send" and not named.get("begun"))
        return super()._record(kind, *given, **named)

    def _begin(self, call: CommunicationCall, given: list[Tensor], into: list[Tensor]) -> Callable[[], None]:
        if call.kind == "recv":

            def take() -> None:
                self._flights.pass_time(blocking=True)
                into[0].copy_(self._exchange.receive(self.rank, call))

            return take
        meeting = self._exchange.join(self.rank, call)
        flight = self._flights.start(
            call,
            given,
            into,
            lambda values: self._exchange.give(self.rank, meeting, values),
            lambda wait: self._exchange.result(self.rank, call, meeting) if wait or meeting.results else None,
        )
        return lambda: self._flights.land(flight)

    def settle(self) -> None:
        self._flights.settle()

    def _collective(self, call: CommunicationCall, given: list[Tensor]) -> list[Tensor]:
        return self._exchange.meet(self.rank, call, given)

    def _send(self, tensor: Tensor, call: CommunicationCall) -> None:
        self._flights.keep(call, tensor)
        self._exchange.send(self.rank, call, tensor.clone())

    def _recv(self, call: CommunicationCall) -> Tensor:
        return self._exchange.receive(self.rank, call)
