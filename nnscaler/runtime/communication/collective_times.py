"""Time collectives between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from nnscaler.runtime.communication.communicator import Communicator

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times


def time_collectives(communicator: Communicator, calls: Sequence[tuple[str, int, int]]) -> list[float]:
    """Time each call (kind, ranks of a group, bytes) on this rank, in seconds.

    A time is the lower quartile of some, since whatever else the machine does only adds to them. Groups of consecutive
    ranks call at the same time. Bytes are those of the tensor whole along the group; of the message, for `send`. All
    sizes are rounded up to elements of float32.
    """
    everyone = tuple(range(communicator.world_size))
    taken: list[float] = []
    for number, (kind, size, count) in enumerate(calls):
        first = communicator.rank // size * size
        group = tuple(range(first, first + size))
        function = _call(communicator, kind, group, -(-count // 4), number)
        repeats: list[float] = []
        for _ in range(REPEATS + 1):
            communicator.barrier(everyone)
            start = time.perf_counter()
            for _ in range(TOGETHER):
                function()
            repeats.append((time.perf_counter() - start) / TOGETHER)
        taken.append(sorted(repeats[1:])[REPEATS // 4])
    return taken


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
