"""Ranks as threads of this process, over a simulated backend of torch.distributed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nnscaler.runtime.jobs.fair_clock import LEAST, FairClock
from verify.external.ranks.exchange import Exchange
from verify.external.ranks.places import place_of_error
from verify.external.ranks.rank_state import environment_of, load_state, save_state
from verify.external.ranks.records import RankRun, RanksFailed
from verify.external.ranks.simulated_group import SimulatedGroup, SimulatedStore
from verify.external.ranks.torch_private import (
    RankWorlds,
    new_world,
    ranks_as_threads,
    register_groups_here,
    unwaited_collectives,
)
from verify.external.ranks.turns import RankStopped, Turns

T = TypeVar("T")

_GRACE = 2.0  # seconds, on the wall, for threads to end after a failure


def run_simulated(
    function: Callable[[int], T],
    ranks: int,
    *,
    initialise: bool,
    free_threads: bool,
    timeout: float,
    note: Callable[[str], None] = lambda text: None,
) -> RankRun[T]:
    """Call `function(rank)` on a thread for each rank, and return what they return. Raises RanksFailed.

    `note` is told what the ranks do, before they do it.
    """
    turns = Turns(ranks, not free_threads, note)
    exchange = Exchange(turns, ranks)
    results: dict[int, T] = {}
    before, unwaited = save_state(), unwaited_collectives()

    def create(options: Any) -> SimulatedGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(ranks))
        return SimulatedGroup(exchange, options.group_id, options.group_rank, members)

    with ranks_as_threads(create) as worlds, _helpers_of_ranks(turns, worlds):

        def work(rank: int) -> None:
            world = new_world(
                rank=rank, ranks=ranks, store=SimulatedStore(exchange), identity=time.monotonic_ns() + rank
            )
            _live_as_rank(turns, worlds, world, lambda: results.update({rank: function(rank)}), initialise)

        threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
        try:
            turns.start([_state_of(rank, ranks) for rank in range(ranks)])
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
    lost = exchange.undelivered()
    if lost:
        raise RanksFailed("communication_mismatch", "\n".join(["messages were never received:", *lost]))
    return RankRun(
        tuple(results[rank] for rank in range(ranks)),
        tuple(tuple(calls) for calls in exchange.calls),
        unwaited_collectives() - unwaited,
    )


def _state_of(rank: int, ranks: int) -> Any:
    """Return the state of this process with the variables of a rank."""
    state = save_state()
    return replace(state, variables=environment_of(rank, ranks))


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
    text = "".join(traceback.format_exception(error))
    with turns.lock:
        if turns.failure is None:
            message = f"rank {rank} raised {type(error).__name__}: {error}"
            by_rank = {**turns.by_rank(), rank: text}
            place = place_of_error(error.__traceback__)
            turns.fail(RanksFailed("rank_raises", message, rank=rank, place=place, by_rank=by_rank))


def _follow(threads: list[threading.Thread], turns: Turns, timeout: float) -> None:
    """Wait until all ranks have ended, or one has failed; fail the run when the time is up."""
    clock = FairClock(os.getpid())
    for thread in threads:
        while thread.is_alive() and turns.failure is None:
            thread.join(LEAST)
            if clock.seconds() > timeout:
                with turns.lock:
                    doing = turns.by_rank()
                    lines = [f"  rank {rank} {text}" for rank, text in doing.items()]
                    message = "\n".join([f"ranks were still running after {timeout:.0f} s", *lines])
                    turns.fail(RanksFailed("timed_out", message, by_rank=doing))
    if turns.failure is None:
        return
    _stop(threads)


def _stop(threads: list[threading.Thread]) -> None:
    """End threads that compute: they are raised at, for a thread cannot be killed. What is in a kernel goes on."""
    until = time.monotonic() + _GRACE
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        for thread in threads:
            thread.join(0.05)
            if thread.is_alive() and thread.ident is not None and time.monotonic() > until - _GRACE / 2:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(RankStopped))


@contextlib.contextmanager
def _helpers_of_ranks(turns: Turns, worlds: RankWorlds) -> Iterator[None]:
    """Hand the rank of a thread, and its groups, on to the threads that it starts."""
    start = threading.Thread.start

    def start_helper(thread: threading.Thread) -> None:
        turn, world = turns.here(), worlds.world()
        if turn is not None and world is not None:
            run = thread.run

            def run_as_helper() -> None:
                worlds.enter(world)
                register_groups_here(world)
                helper = turns.begin_helper(turn.rank)
                try:
                    run()
                except RankStopped:
                    pass
                finally:
                    turns.end(helper)
                    worlds.leave()

            thread.run = run_as_helper  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_helper  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
