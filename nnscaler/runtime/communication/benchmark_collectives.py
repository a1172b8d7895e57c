"""Time collectives between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch

from nnscaler.runtime.communication.communicator import Communicator, Pending

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times
ALONE = 12  # turns of computing alone between them: more, since no call keeps ranks together that share cores
LEAST = 1e-6  # seconds of a call that is lost in the noise
SENT = object()  # returned where a call is no more than the begin of it: it ends on another rank
BETWEEN = 4e-3  # seconds of computing before each call, while all ranks compute
_HIDDEN = (1 << 17, 1 << 20)  # bytes of the tensors that are under way while ranks compute


def time_collectives(
    communicator: Communicator, calls: Sequence[tuple[str, int, int, int]], seconds: float = inf
) -> tuple[list[float], dict[int, float]]:
    """Time each call (kind, ranks of a group, bytes, ranks that call at once), in seconds, the same on every rank; and,
    for each number of ranks that call at once, the share of a sum of all of them which computing hides on this rank,
    see `hidden_share`.

    A call is timed as a step sees it, between products of matrices: what a rank that computes and calls in turn takes
    more than one that only computes. Where ranks share cores, one that waits for a message lets another compute, and
    has to wait for a core when the message is there. All calls take turns, in rounds: what disturbs the machine for a
    while disturbs all alike. A turn takes as long as on its slowest rank: one that computes alone may have a core for
    itself while the others wait, and seem to be fast. A time is the lower quartile of its turns, since whatever else
    the machine does only adds to them. Groups of consecutive ranks call at the same time. Bytes are those of the tensor
    whole along the group; of the message, for `send`. All sizes are rounded up to elements of float32. `seconds`: after
    which no round begins, but for the first that counts.

    Where something else holds the cores, the two that are subtracted may have met more or less of it. So a call takes
    no less than the rank that is in it for the shortest time: this one came last, and waited for no other.
    """
    everyone, products = tuple(range(communicator.world_size)), Products(communicator)
    turns: list[tuple[int, int, Callable[[], object]]] = []
    for number, (kind, size, count, at_once) in enumerate(calls):
        first = communicator.rank // size * size
        group = tuple(range(first, first + size))
        takes_part = communicator.rank < at_once
        function = _call(communicator, kind, group, -(-count // 4), number) if takes_part else _nothing
        turns.append((at_once, TOGETHER, function))
    counts = sorted({at_once for at_once, _, _ in turns})
    turns += [(count, ALONE, _nothing) for count in counts]
    taken: list[list[float]] = [[] for _ in turns]
    inside: list[list[float]] = [[] for _ in turns]  # negative, since the shortest one counts
    begin = time.perf_counter()
    for number in range(REPEATS + 1):
        for (at_once, repeats, function), times, called in zip(turns, taken, inside, strict=True):
            communicator.barrier(everyone)
            start, calling = time.perf_counter(), 0.0
            for _ in range(repeats if communicator.rank < at_once else 0):
                products.run()
                before = time.perf_counter()
                ends = function() is not SENT
                calling += time.perf_counter() - before if ends else inf
            times.append((time.perf_counter() - start) / repeats)
            called.append(-calling / repeats if communicator.rank < at_once else -inf)
        if number and later_than(communicator, begin + seconds):
            break
    both = communicator.all_reduce(torch.tensor([taken, inside], dtype=torch.float64), everyone, "max")
    usual = [lower_quartile(times[1:]) for times in both[0].tolist()]
    least = [lower_quartile([-called for called in turn[1:]]) for turn in both[1].tolist()]
    computing = dict(zip(counts, usual[len(calls) :], strict=True))
    hidden = {count: hidden_share(communicator, count, products) for count in counts}
    found = zip(turns[: len(calls)], usual, least, strict=False)
    return [max(LEAST, shortest, seconds - computing[at_once]) for (at_once, _, _), seconds, shortest in found], hidden


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
    """Return the share of a collective over the first `count` ranks that takes none of their time where they begin it,
    compute, and wait for it afterwards, as they do with the buckets of gradients and with parameters in shards.

    Products alone, a call after products, and a call under them are timed in turn: what is hidden is what the last
    takes less than the one before. 0 on other ranks.
    """
    everyone, group = tuple(range(communicator.world_size)), tuple(range(count))
    if communicator.rank >= count:
        begins: list[Callable[[], Pending]] = [_no_call] * len(_begun(communicator, everyone))
    else:
        begins = _begun(communicator, group)
    after = under = 0.0
    for begin in begins:
        found: list[list[float]] = [[], [], []]
        for _ in range(REPEATS + 1):
            for way, times in enumerate(found):
                communicator.barrier(everyone)
                if communicator.rank < count:
                    times.append(_timed(begin, products, way))
        if communicator.rank < count:
            nothing, one, other = (lower_quartile(times[1:]) for times in found)
            after, under = after + one - nothing, under + other - nothing
    return min(1.0, max(0.0, 1 - under / after)) if after > 0 else 0.0


def _timed(begin: Callable[[], Pending], products: Products, way: int) -> float:
    """Return the seconds of products alone (0), with a call after them (1), or under them (2)."""
    start = time.perf_counter()
    pending = begin() if way == 2 else None
    products.run()
    products.run()
    if way == 1:
        pending = begin()
    if pending is not None:
        pending.wait()
    return time.perf_counter() - start


def _begun(communicator: Communicator, group: tuple[int, ...]) -> list[Callable[[], Pending]]:
    """Return what begins each kind of call that is waited for later, on tensors of both sizes."""
    found: list[Callable[[], Pending]] = []
    for size in _HIDDEN:
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // len(group))
        parts = [torch.empty_like(part) for _ in group]
        found.append(partial(communicator.start_all_reduce, whole, group))
        found.append(partial(communicator.start_all_gather, part, parts, group))
        found.append(partial(communicator.start_reduce_scatter, [torch.ones_like(part) for _ in group], part, group))
    return found


def _no_call() -> Pending:
    raise AssertionError("a rank that takes no part begins nothing")


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

    def pass_on() -> object:
        """Even ranks send to the next; a rank without a partner waits at the barrier."""
        if place % 2 == 1:
            return communicator.recv(message.shape, message.dtype, communicator.rank - 1, ("timed", number))
        if place + 1 < size:
            communicator.send(message, communicator.rank + 1, ("timed", number))
            communicator.finish()
        return SENT

    return pass_on
