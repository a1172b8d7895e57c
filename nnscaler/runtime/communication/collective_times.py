"""Time collectives between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf

import torch

from nnscaler.runtime.communication.communicator import Communicator

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times
LEAST = 1e-6  # seconds of a call that is lost in the noise
BETWEEN = 4e-3  # seconds of computing before each call, while all ranks compute
_HIDDEN = 1 << 20  # bytes of the sum that computing may hide


def time_collectives(
    communicator: Communicator, calls: Sequence[tuple[str, int, int, int]], seconds: float = inf
) -> tuple[list[float], dict[int, float]]:
    """Time each call (kind, ranks of a group, bytes, ranks that call at once) on this rank, in seconds; and, for each
    number of ranks that call at once, the share of a sum of all of them which computing hides, see `hidden_share`.

    A call is timed as a step sees it, between products of matrices: what a rank that computes and calls in turn takes
    more than one that only computes. Where ranks share cores, one that waits for a message lets another compute, and
    has to wait for a core when the message is there. All calls take turns, in rounds: what disturbs the machine for a
    while disturbs all alike. A time is the lower quartile of its turns, since whatever else the machine does only adds
    to them. Groups of consecutive ranks call at the same time. Bytes are those of the tensor whole along the group; of
    the message, for `send`. All sizes are rounded up to elements of float32. `seconds`: after which no round begins,
    but for the first that counts.
    """
    everyone, products = tuple(range(communicator.world_size)), Products(communicator)
    turns: list[tuple[int, Callable[[], object]]] = []
    for number, (kind, size, count, at_once) in enumerate(calls):
        first = communicator.rank // size * size
        group = tuple(range(first, first + size))
        takes_part = communicator.rank < at_once
        turns.append((at_once, _call(communicator, kind, group, -(-count // 4), number) if takes_part else _nothing))
    counts = sorted({at_once for at_once, _ in turns})
    turns += [(count, _nothing) for count in counts]
    taken: list[list[float]] = [[] for _ in turns]
    begin = time.perf_counter()
    for number in range(REPEATS + 1):
        for (at_once, function), times in zip(turns, taken, strict=True):
            communicator.barrier(everyone)
            start = time.perf_counter()
            for _ in range(TOGETHER if communicator.rank < at_once else 0):
                products.run()
                function()
            times.append((time.perf_counter() - start) / TOGETHER)
        if number and later_than(communicator, begin + seconds):
            break
    usual = [lower_quartile(times[1:]) for times in taken]
    computing = dict(zip(counts, usual[len(calls) :], strict=True))
    hidden = {count: hidden_share(communicator, count, products) for count in counts}
    pairs = zip(turns[: len(calls)], usual, strict=False)
    return [max(LEAST, seconds - computing[at_once]) for (at_once, _), seconds in pairs], hidden


class Products:
    """Products of matrices, as many as take about `BETWEEN` seconds while all ranks compute."""

    def __init__(self, communicator: Communicator) -> None:
        everyone = tuple(range(communicator.world_size))
        self._matrix, self.count = torch.full((128, 128), 1e-3), 20
        self.run()
        communicator.barrier(everyone)
        start = time.perf_counter()
        self.run()
        took = torch.tensor([time.perf_counter() - start])
        slowest = float(communicator.all_reduce(took, everyone, "max").item())
        self.count = max(1, round(self.count * BETWEEN / slowest))

    def run(self) -> None:
        for _ in range(self.count):
            torch.mm(self._matrix, self._matrix)


def hidden_share(communicator: Communicator, count: int, products: Products) -> float:
    """Return the share of a sum over the first `count` ranks that takes none of their time while they compute.

    A sum alone, products alone that take longer, and both at once are timed in turn. Where ranks share cores with what
    carries their messages, both take longer than the longer of them. 0 on other ranks.
    """
    everyone, group = tuple(range(communicator.world_size)), tuple(range(count))
    values, again = torch.ones(_HIDDEN // 4), 1
    found: dict[tuple[bool, bool], list[float]] = {(True, False): [], (False, True): [], (True, True): []}
    for number in range(2 * REPEATS + 1):
        for (sums, computes), times in found.items():
            communicator.barrier(everyone)
            if communicator.rank >= count:
                continue
            start = time.perf_counter()
            pending = communicator.start_all_reduce(values, group) if sums else None
            for _ in range(again if computes else 0):
                products.run()
            if pending is not None:
                pending.wait()
            times.append(time.perf_counter() - start)
        if not number and communicator.rank < count:
            again = max(1, round(2 * found[True, False][0] / found[False, True][0]))
    if communicator.rank >= count:
        return 0.0
    alone, computing, both = (lower_quartile(times[1:]) for times in found.values())
    return min(1.0, max(0.0, (alone + computing - both) / min(alone, computing)))


def lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def later_than(communicator: Communicator, when: float) -> bool:
    """Return on all ranks alike whether a moment of the clock has passed on one of them."""
    passed = torch.tensor([float(time.perf_counter() > when)])
    return bool(communicator.all_reduce(passed, tuple(range(communicator.world_size)), "max").item())


def _nothing() -> None:
    """Take no part in a call."""


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
