"""Time collectives between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import fmean, median

import torch

from nnscaler.runtime.communication.communicator import Communicator

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times
_HIDDEN = (1 << 18, 1 << 22)  # bytes of the sums that computing may hide


def time_collectives(
    communicator: Communicator, calls: Sequence[tuple[str, int, int, int]], seconds: float = inf
) -> tuple[list[float], dict[int, float]]:
    """Time each call (kind, ranks of a group, bytes, ranks that call at once) on this rank, in seconds; and, for each
    number of ranks that call at once, the share of a sum of all of them which computing hides, see `hidden_share`.

    All calls take turns, in rounds: what disturbs the machine for a while disturbs all alike. A time is the lower
    quartile of its turns, since whatever else the machine does only adds to them. Groups of consecutive ranks call at
    the same time. Bytes are those of the tensor whole along the group; of the message, for `send`. All sizes are
    rounded up to elements of float32. `seconds`: after which no round begins, but for the first that counts.
    """
    everyone = tuple(range(communicator.world_size))
    functions: list[Callable[[], object]] = []
    for number, (kind, size, count, at_once) in enumerate(calls):
        if communicator.rank >= at_once:
            functions.append(_wait)
            continue
        first = communicator.rank // size * size
        functions.append(_call(communicator, kind, tuple(range(first, first + size)), -(-count // 4), number))
    taken: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for number in range(REPEATS + 1):
        for function, times in zip(functions, taken, strict=True):
            communicator.barrier(everyone)
            start = time.perf_counter()
            for _ in range(TOGETHER):
                function()
            times.append((time.perf_counter() - start) / TOGETHER)
        if number and later_than(communicator, begin + seconds):
            break
    hidden = {count: hidden_share(communicator, count) for count in sorted({at_once for *_, at_once in calls})}
    return [sorted(times[1:])[(len(times) - 1) // 4] for times in taken], hidden


def hidden_share(communicator: Communicator, count: int) -> float:
    """Return the share of a sum over the first `count` ranks that takes none of their time while they compute.

    A sum alone, a product of matrices again and again that takes as long, and both at once are timed in turn. Where
    ranks share cores with what carries their messages, both take longer than the longer of them. 0 on other ranks.
    """
    everyone, group = tuple(range(communicator.world_size)), tuple(range(count))
    matrix = torch.full((128, 128), 1e-3)
    shares: list[float] = []
    for size in _HIDDEN:
        values, products = torch.ones(size // 4), 1
        alone: list[float] = []
        computing: list[float] = []
        both: list[float] = []
        for number in range(REPEATS + 1):
            for times, sums, computes in ((alone, True, False), (computing, False, True), (both, True, True)):
                communicator.barrier(everyone)
                if communicator.rank >= count:
                    continue
                start = time.perf_counter()
                pending = communicator.start_all_reduce(values, group) if sums else None
                for _ in range(products if computes else 0):
                    torch.mm(matrix, matrix)
                if pending is not None:
                    pending.wait()
                times.append(time.perf_counter() - start)
            if not number and communicator.rank < count:
                products = max(1, round(alone.pop() / max(computing.pop(), 1e-6)))
                both.pop()
        if both:
            summed, computed, together = median(alone), median(computing), median(both)
            shares.append((summed + computed - together) / min(summed, computed))
    return min(1.0, max(0.0, fmean(shares))) if shares else 0.0


def _wait() -> None:
    """What a rank does that takes no part in a call."""


def later_than(communicator: Communicator, when: float) -> bool:
    """Return on all ranks alike whether a moment of the clock has passed on one of them."""
    passed = torch.tensor([float(time.perf_counter() > when)])
    return bool(communicator.all_reduce(passed, tuple(range(communicator.world_size)), "max").item())


def _call(
    communicator: Communicator, kind: str, group: tuple[int, ...], elements: int, number: int
) -> Callable[[], object]:
    size = len(group)
    shard = torch.ones(max(1, elements // size))
    if kind == "all_reduce":
        whole = torch.ones(max(1, elements))
        return lambda: communicator.all_reduce(whole, group)
    if kind == "all_gather":
        return lambda: communicator.all_gather(shard, group)
    if kind == "reduce_scatter":
        return lambda: communicator.reduce_scatter([shard] * size, group)
    if kind == "all_to_all":
        piece = torch.ones(max(1, elements // size**2))
        return lambda: communicator.all_to_all([piece] * size, group)
    assert kind == "send", kind
    message = torch.ones(max(1, elements))
    place = communicator.rank - group[0]

    def pass_on() -> None:
        """Even ranks send to the next; a rank without a partner waits at the barrier."""
        if place % 2 == 0 and place + 1 < size:
            communicator.send(message, communicator.rank + 1, ("timed", number))
            communicator.finish()
        elif place % 2 == 1:
            communicator.recv(message.shape, message.dtype, communicator.rank - 1, ("timed", number))

    return pass_on
