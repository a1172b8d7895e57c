"""A run of ranks in a child process, so that one that ends its process is a finding."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import TypeVar, cast

from verify.external.ranks.places import place_in_stack
from verify.external.ranks.records import RankRun, RanksFailed
from verify.external.ranks.torch_private import preload
from verify.processes.pool import Died, Done, Note, TimedOut, run_forked

T = TypeVar("T")

_RANK = re.compile(r"rank (\d+)")


def run_in_child(run: Callable[[Note], RankRun[T]], timeout: float) -> RankRun[T]:
    """Return what `run` returns in a forked child; it is told where to note what the ranks are doing.

    Raises RanksFailed, also where the child dies. The results must be picklable.
    """

    def task(note: Note) -> bytes:
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
        how = event.how if isinstance(event, Died) else f"still running after {event.seconds:.0f} s"
        named = _RANK.match(event.note)
        rank = int(named.group(1)) if named is not None else None
        message = f"the process of the ranks was {how}" + (f"; {event.note}" if event.note else "")
        by_rank = {} if rank is None else {rank: f"{event.note}\n{event.trace}".rstrip()}
        raise RanksFailed(code, message, rank=rank, place=place_in_stack(event.trace), by_rank=by_rank)
    raise RanksFailed("rank_raises", str(event.error), by_rank={0: event.text})
