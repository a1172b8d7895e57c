"""Time collectives between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

import torch

from nnscaler.runtime.communication.communicator import Communicator

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times


def time_collectives(
    communicator: Communicator, calls: Sequence[tuple[str, int, int, int]], seconds: float = inf
) -> list[float]:
    """Time each call (kind, ranks of a group, bytes, ranks that call at once) on this rank, in seconds.

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
    return [sorted(times[1:])[(len(times) - 1) // 4] for times in taken]


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
