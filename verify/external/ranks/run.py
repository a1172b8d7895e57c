"""Run a function once for each rank of a torch.distributed program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verify.external.ranks.records import FAILURES, RankCall, RankRun, RanksFailed
from verify.external.ranks.simulator import run_simulated

__all__ = ["FAILURES", "RankCall", "RankRun", "RanksFailed", "run_ranks"]

T = TypeVar("T")


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
    return run_simulated(function, ranks, initialise=initialise, free_threads=free_threads, timeout=timeout)
