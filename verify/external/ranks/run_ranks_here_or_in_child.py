"""Run a function once for each rank of a torch.distributed program: in this process, or in a child, so that a rank that
ends its process is a finding."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from verify.child_processes import Died, Done, Note, TimedOut, run_forked
from verify.external.ranks.call_sites import place_in_stack
from verify.external.ranks.globals_of_ranks import empty_caches
from verify.external.ranks.processes.run_over_gloo import run_over_gloo
from verify.external.ranks.run_result import FAILURES, RankCall, RankRun, RanksFailed
from verify.external.ranks.threads.simulator import run_simulated
from verify.external.ranks.torch_private import preload

__all__ = ["FAILURES", "RankCall", "RankRun", "RanksFailed", "run_ranks"]

T = TypeVar("T")

_PATIENCE = 10.0  # seconds that a child has to tell that the time is up


def run_ranks(
    function: Callable[[int], T],
    ranks: int,
    executor: str = "simulator",
    *,
    initialise: bool = True,
    isolate: bool = False,
    timeout: float = 120.0,
) -> RankRun[T]:
    """Call `function(rank)` on every rank, and return the results by rank.

    executor      "simulator": threads of this process over a simulated backend; "gloo": forked processes
    initialise    the default process group exists when the function is called, and is destroyed after it
    isolate       simulator: in a forked child, so that ranks that end the process raise RanksFailed ("rank_died"); the
                  results must be picklable
    timeout       seconds of a FairClock for the whole run

    Raises RanksFailed where ranks disagree, wait for ever, raise, die, or are not done in time.
    """
    assert executor in ("simulator", "gloo"), executor
    if executor == "gloo":
        return run_over_gloo(function, ranks, initialise=initialise, timeout=timeout)
    simulated = partial(run_simulated, function, ranks, initialise=initialise, timeout=timeout)
    return run_in_child(lambda note: simulated(note=note), timeout + _PATIENCE) if isolate else simulated()


_RANK = re.compile(r"rank (\d+)")


def run_in_child(run: Callable[[Note], RankRun[T]], timeout: float) -> RankRun[T]:
    """Return what `run` returns in a forked child; it is told where to note what the ranks are doing.

    Raises RanksFailed, also where the child dies. The results must be picklable.
    """

    def task(note: Note) -> bytes:
        empty_caches()
        try:
            return pickle.dumps(run(note))
        except RanksFailed as failure:
            return pickle.dumps(failure)

    preload()
    (event,) = run_forked([task], 1, timeout)
    if isinstance(event, Done):
        found = pickle.loads(event.result)
        if isinstance(found, RanksFailed):
            raise found
        return cast(RankRun[T], found)
    if isinstance(event, Died | TimedOut):
        code = "rank_died" if isinstance(event, Died) else "timed_out"
        named = _RANK.match(event.note)
        rank = int(named.group(1)) if named is not None else None
        message = f"the process of the ranks was {event.how}" + (f"; {event.note}" if event.note else "")
        by_rank = {} if rank is None else {rank: f"{event.note}\n{event.trace}".rstrip()}
        raise RanksFailed(code, message, rank=rank, place=place_in_stack(event.trace), by_rank=by_rank)
    raise RanksFailed("rank_raises", str(event.error), by_rank={0: event.text})
