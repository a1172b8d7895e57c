"""Ranks as threads of this process, over a simulated backend of torch.distributed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.communication.simulator import await_exit
from nnscaler.runtime.jobs.load_adjusted_clock import LEAST, FairClock
from nnscaler.runtime.keep_freed_memory import kept_memory
from nnscaler.runtime.start_autograd import fake_before_threads
from verify.external.ranks.call_sites import place_of_call, place_of_error, place_of_thread, traceback_of
from verify.external.ranks.collective_semantics import CollectiveShare
from verify.external.ranks.globals_of_ranks import (
    environment_of,
    load_state,
    save_state,
    tensors_of_all,
    with_own_caches,
)
from verify.external.ranks.process_group_base import RankGroup, Real
from verify.external.ranks.run_result import RankRun, RanksFailed
from verify.external.ranks.threads.exchange import MessageEnd, ThreadExchange
from verify.external.ranks.threads.threads_started_by_ranks import helpers_of_ranks
from verify.external.ranks.threads.turns import RankStopped, Turns
from verify.external.ranks.torch_private import RankWorlds, Store, new_world, ranks_as_threads, unwaited_collectives
from verify.external.ranks.unwaited_async_calls import BegunWork, all_forgotten

# Groups and stores of torch.distributed whose ranks are threads of this process.


class SimulatedWork(BegunWork):
    """A collective or message that was begun."""

    def __init__(
        self,
        exchange: ThreadExchange,
        call: CommunicationCall,
        ready: Callable[[], bool],
        results: Sequence[Tensor],
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__(results)
        self._exchange = exchange
        self._call = call
        self._ready = ready
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.reached()
        self._exchange.wait(self._call, self._ready)
        return True

    def is_completed(self) -> bool:
        self.reached()
        return self._exchange.asked(self._call, self._ready)

    def is_success(self) -> bool:
        self.reached()
        return self._ready()

    def exception(self) -> None:
        return None

    def _source_rank(self) -> int:
        return self._source()


class SimulatedGroup(RankGroup):
    """A group whose ranks meet in an exchange."""

    def __init__(self, exchange: ThreadExchange, name: str, place: int, members: tuple[int, ...]) -> None:
        super().__init__(name, place, members)
        self._exchange = exchange
        exchange.begun.append(self.begun)

    def begin_collective(self, part: CollectiveShare, root: int | None, options: Any, real: Real) -> SimulatedWork:
        self._check_thread()
        meeting = self._exchange.begin(self.key, self.place, part, root)
        results = [tensor for item in part.outputs for tensor in item]
        return SimulatedWork(self._exchange, part.call, lambda: meeting.done, results)

    def begin_message(self, call: CommunicationCall, tensor: Tensor, peer: int, tag: int) -> SimulatedWork:
        self._check_thread()
        if call.kind == "send":
            message = MessageEnd(call, tensor, self.place)
            self._exchange.send(self.key, peer, tag, message)
        else:
            message = MessageEnd(call, tensor, peer)
            self._exchange.receive(self.key, self.place, tag, message)
        return SimulatedWork(self._exchange, call, lambda: message.done, [tensor], lambda: message.source)

    def _check_thread(self) -> None:
        turn = self._exchange.turns.here()
        if turn is None or turn.rank != self.members[self.place]:
            who = "no rank's thread" if turn is None else f"rank {turn.rank}"
            raise RuntimeError(f"the group of rank {self.members[self.place]} is used on {who}")


class SimulatedStore(Store):  # type: ignore[misc]
    """The keys of a run, one view of them a thread: a rank that waits for a key is seen to wait."""

    def __init__(self, exchange: ThreadExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def set(self, key: str, value: str | bytes) -> None:
        with self._exchange.turns.lock:
            self._exchange.store[key] = _bytes(value)
            self._exchange.turns.poke()

    def get(self, key: str) -> bytes:
        self._wait([key], "get")
        return self._exchange.store[key]

    def add(self, key: str, amount: int) -> int:
        with self._exchange.turns.lock:
            value = int(self._exchange.store.get(key, b"0")) + amount
            self._exchange.store[key] = str(value).encode()
            self._exchange.turns.poke()
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, "wait")

    def check(self, keys: Sequence[str]) -> bool:
        place = place_of_call()
        return self._exchange.asked(f"store.check({', '.join(keys)}) at {place}", lambda: self._has(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._exchange.turns.lock:
            store = self._exchange.store
            if key not in store and _bytes(expected):
                return _bytes(expected)
            if store.get(key, b"") == _bytes(expected):
                store[key] = _bytes(desired)
                self._exchange.turns.poke()
            return store[key]

    def delete_key(self, key: str) -> bool:
        with self._exchange.turns.lock:
            return self._exchange.store.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._exchange.store)

    def append(self, key: str, value: str | bytes) -> None:
        with self._exchange.turns.lock:
            self._exchange.store[key] = self._exchange.store.get(key, b"") + _bytes(value)
            self._exchange.turns.poke()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing to do: what never comes is seen, not waited for."""

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._exchange)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._exchange.store for key in keys)

    def _wait(self, keys: Sequence[str], name: str) -> None:
        self._exchange.wait(f"store.{name}({', '.join(keys)}) at {place_of_call()}", lambda: self._has(keys))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# The ranks.


T = TypeVar("T")

_AWAY = 0.4  # seconds in which a rank that runs does nothing, after which another one may run
_STALL = 4.0  # seconds in which nothing happens at all
_BUSY = 0.1  # seconds of processor time a second, of a process that does something
_GRACE = 2.0  # seconds, on the wall, for threads to end after a failure


def run_simulated(
    function: Callable[[int], T],
    ranks: int,
    *,
    initialise: bool,
    timeout: float,
    note: Callable[[str], None] = lambda text: None,
) -> RankRun[T]:
    """Call `function(rank)` on a thread for each rank, and return what they return. Raises RanksFailed.

    `note` is told what the ranks do, before they do it.
    """
    turns = Turns(ranks, note)
    exchange = ThreadExchange(turns, ranks)
    results: dict[int, T] = {}
    unwaited: dict[int, int] = {}
    before = save_state()
    shared = tensors_of_all(before)

    def create(options: Any) -> SimulatedGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(ranks))
        return SimulatedGroup(exchange, options.group_id, options.group_rank, members)

    with kept_memory(), ranks_as_threads(create) as worlds, helpers_of_ranks(turns, worlds):

        def work(rank: int) -> None:
            identity = time.monotonic_ns() + rank
            world = new_world(rank=rank, ranks=ranks, store=SimulatedStore(exchange), identity=identity)

            def body() -> None:
                results[rank] = function(rank)
                unwaited[rank] = unwaited_collectives()  # of this thread

            _live_as_rank(turns, worlds, world, body, initialise)

        threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
        fake_before_threads()
        try:
            own = [with_own_caches(before) for _ in range(ranks)]
            turns.start([replace(s, variables=environment_of(rank, ranks)) for rank, s in enumerate(own)])
            for thread in threads:
                thread.start()
            _follow(threads, turns, timeout)
        except BaseException:  # an interrupt stops the ranks as well
            with turns.lock:
                turns.fail(RanksFailed("timed_out", "the ranks were stopped"))
            _stop(threads)
            raise
        finally:
            load_state(before)
    if turns.failure is not None:
        _stop(threads)
        raise turns.failure
    _check_unchanged(shared)
    lost = exchange.undelivered()
    if lost:
        raise RanksFailed("communication_mismatch", "\n".join(["messages were never received:", *lost]))
    calls = tuple(tuple(calls) for calls in exchange.calls)
    forgotten = all_forgotten(exchange.begun)
    return RankRun(tuple(results[rank] for rank in range(ranks)), calls, sum(unwaited.values()), forgotten)


def _check_unchanged(shared: Iterable[tuple[str, torch.Tensor, int]]) -> None:
    """Raise RanksFailed where a shared tensor was changed in place: one rank would see what another one has counted
    there, as if they had added it up."""
    for place, tensor, version in shared:
        if tensor._version != version:
            told = f"`{place}` is changed in place, a tensor that the threads of all ranks share"
            raise RanksFailed("rank_raises", told)


def _live_as_rank(
    turns: Turns, worlds: RankWorlds, world: SimpleNamespace, body: Callable[[], None], initialise: bool
) -> None:
    """Run a rank's body on this thread, from its first turn to its end."""
    rank: int = world.rank
    worlds.enter(world)
    torch.set_num_threads(1)
    try:
        turns.begin(rank)
        # backward runs on the rank's own thread; and a new thread would not inherit these modes
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            if initialise:
                dist.init_process_group("gloo", store=world.store, rank=rank, world_size=world.ranks)
            body()
    except RankStopped:
        pass
    except BaseException as error:  # noqa: BLE001 - what a program raises, SystemExit included, is a result
        _report(turns, rank, error)
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        turns.end(turns.mains[rank])
        worlds.leave()


def _report(turns: Turns, rank: int, error: BaseException) -> None:
    """Note that a rank has raised. What torch wraps around the end of another rank is no failure of its own."""
    text = traceback_of(error)
    with turns.lock:
        if turns.failure is None:
            message = f"rank {rank} raised {type(error).__name__}: {error}"
            by_rank = {**turns.by_rank(), rank: text}
            place = place_of_error(error.__traceback__)
            turns.fail(RanksFailed("rank_raises", message, rank=rank, place=place, by_rank=by_rank))


class _Idle:
    """Looks whether nothing happens although ranks have helpers, which may wait for what is not known here."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since = time.monotonic()
        self._used = time.process_time()

    def look(self) -> None:
        """Let another rank run when nobody has used the processor for some time; later call it a deadlock."""
        now, used = time.monotonic(), time.process_time()
        if not self._turns.helpers or used - self._used > _BUSY * (now - self._since):
            self._since, self._used = now, used
        elif now - self._since > _STALL:
            self._turns.give_up()
        elif now - self._since > _AWAY:
            self._turns.lend()


def _follow(threads: list[threading.Thread], turns: Turns, timeout: float) -> None:
    """Wait until all ranks have ended, or one has failed; fail the run when the time is up."""
    clock = FairClock(os.getpid())
    idle = _Idle(turns)
    for thread in threads:
        while thread.is_alive() and turns.failure is None:
            thread.join(LEAST)
            idle.look()
            if clock.seconds() > timeout:
                _say_late(threads, turns, timeout)
    if turns.failure is None:
        await_exit(threads)
    else:
        _stop(threads)


def _say_late(threads: list[threading.Thread], turns: Turns, timeout: float) -> None:
    """Fail the run because its time is up, and say where the ranks are."""
    with turns.lock:
        doing = turns.by_rank()
        running = [turn.rank for turn in turns.mains if turn.status == "running"]
        places = {rank: place_of_thread(threads[rank].ident) for rank in running}
        doing |= {rank: f"{doing[rank]}; it is at {place}" for rank, place in places.items() if place is not None}
        lines = [f"  rank {rank} {text}" for rank, text in doing.items()]
        message = "\n".join([f"ranks were still running after {timeout:.0f} s", *lines])
        rank = running[0] if running else None
        place = places[rank] if rank is not None else None
        turns.fail(RanksFailed("timed_out", message, rank=rank, place=place, by_rank=doing))


def _stop(threads: list[threading.Thread]) -> None:
    """End threads that compute: they are raised at, for a thread cannot be killed. What is in a kernel goes on."""
    until = time.monotonic() + _GRACE
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        for thread in threads:
            thread.join(0.05)
            if thread.is_alive() and thread.ident is not None and time.monotonic() > until - _GRACE / 2:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(RankStopped))
    await_exit(threads)
