"""Run a function once for each rank of a torch.distributed program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verify.external.ranks.isolated import run_in_child
from verify.external.ranks.processes.gloo import run_over_gloo
from verify.external.ranks.records import FAILURES, RankCall, RankRun, RanksFailed
from verify.external.ranks.threads.simulator import run_simulated

__all__ = ["FAILURES", "RankCall", "RankRun", "RanksFailed", "run_ranks", "run_ranks_isolated"]

T = TypeVar("T")

_PATIENCE = 10.0  # seconds that a child has to tell that the time is up


def run_ranks(
    function: Callable[[int], T],
    ranks: int,
    executor: str = "simulator",
    *,
    initialise: bool = True,
    free_threads: bool = False,
    timeout: float = 120.0,
) -> RankRun[T]:
    """Call `function(rank)` on every rank, and return the results by rank.

    executor      "simulator": threads of this process over a simulated backend; "gloo": forked processes
    initialise    the default process group exists when the function is called, and is destroyed after it
    free_threads  simulator only: all ranks run at once, and share random numbers; else one at a time, each with its own
    timeout       seconds of a FairClock for the whole run

    Raises RanksFailed where ranks disagree, wait for ever, raise, die, or are not done in time.
    """
    assert executor in ("simulator", "gloo"), executor
    if executor == "gloo":
        return run_over_gloo(function, ranks, initialise=initialise, timeout=timeout)
    return run_simulated(function, ranks, initialise=initialise, free_threads=free_threads, timeout=timeout)


def run_ranks_isolated(
    function: Callable[[int], T],
    ranks: int,
    executor: str = "simulator",
    *,
    initialise: bool = True,
    free_threads: bool = False,
    timeout: float = 120.0,
) -> RankRun[T]:
    """Do as `run_ranks`, in a forked child: where ranks end the process, RanksFailed is raised ("rank_died").

    The results must be picklable. Ranks over gloo are processes of their own in any case.
    """
    if executor != "simulator":
        return run_ranks(function, ranks, executor, initialise=initialise, timeout=timeout)
    return run_in_child(
        lambda note: run_simulated(
            function, ranks, initialise=initialise, free_threads=free_threads, timeout=timeout, note=note
        ),
        timeout + _PATIENCE,
    )
