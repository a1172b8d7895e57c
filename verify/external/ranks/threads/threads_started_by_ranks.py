"""Make the threads that ranks start helpers of theirs: pools, checkpoints that are written beside training.

A helper belongs to the rank that started it, sees its groups, and runs whenever it can. While a rank that has the baton
waits for a helper, other ranks run: the helper may be waiting for theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from verify.external.ranks.call_sites import place_of_call
from verify.external.ranks.threads.turns import RankStopped, Turn, Turns
from verify.external.ranks.torch_private import RankWorlds, register_groups_here


@contextmanager
def helpers_of_ranks(turns: Turns, worlds: RankWorlds) -> Iterator[None]:
    """Make the threads that ranks start their helpers, and the end of one, and a future, what a rank can wait for."""
    start, join, result, exception = threading.Thread.start, threading.Thread.join, Future.result, Future.exception
    begun: WeakKeyDictionary[threading.Thread, Turn] = WeakKeyDictionary()

    def start_helper(thread: threading.Thread) -> None:
        turn, world = turns.here(), worlds.world()
        if turn is not None and world is not None:
            helper = turns.new_helper(turn.rank)
            begun[thread] = helper
            thread.run = _as_helper(turns, worlds, world, helper, thread.run)  # type: ignore[method-assign]
        start(thread)

    def join_helper(thread: threading.Thread, timeout: float | None = None) -> None:
        helper = begun.get(thread)
        if helper is not None and turns.here() is not None and timeout is None:
            with turns.lock:
                turns.wait(f"the end of a thread at {place_of_call()}", lambda: helper.status == "finished")
        join(thread, timeout)

    def wait_for(future: Future[Any], timeout: float | None) -> None:
        if turns.here() is not None and timeout is None and not future.done():
            future.add_done_callback(lambda _: _poke(turns))
            with turns.lock:
                turns.wait(f"a future at {place_of_call()}", future.done)

    def result_of(future: Future[Any], timeout: float | None = None) -> Any:
        wait_for(future, timeout)
        return result(future, timeout)

    def exception_of(future: Future[Any], timeout: float | None = None) -> Any:
        wait_for(future, timeout)
        return exception(future, timeout)

    threads = patch.multiple(threading.Thread, start=start_helper, join=join_helper)
    with threads, patch.multiple(Future, result=result_of, exception=exception_of):
        yield


def _as_helper(
    turns: Turns, worlds: RankWorlds, world: Any, helper: Turn, run: Callable[[], None]
) -> Callable[[], None]:
    def run_as_helper() -> None:
        turns.begin_helper(helper)
        worlds.enter(world)
        register_groups_here(world)
        try:
            run()
        except RankStopped:
            pass
        finally:
            worlds.leave()
            turns.end(helper)

    return run_as_helper


def _poke(turns: Turns) -> None:
    with turns.lock:
        turns.poke()
