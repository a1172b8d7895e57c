"""Asynchronous collectives over gloo, of one round of messages each: begun, and waited for later, without a thread.

gloo carries messages on a thread of its own, which knows nothing of Python: what one round makes up is sent and
received when it is begun, and added up, or put in its place, when it is waited for. Collectives that are begun together
share a message to each rank, into which what is small is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nnscaler.communication_buckets import SHARED_BYTES
from nnscaler.runtime.communication.communicator import CommunicationCall, Key
from nnscaler.runtime.communication.cross_memory_attach import OfferedTensors

_ALIGNED = 16  # bytes: places in a message, for tensors of any dtype


class Awaited(Protocol):
    """Something under way: a message, as torch returns it, or what is made of messages. It is waited for once."""

    def wait(self) -> object: ...


def wait_for(works: Sequence[Awaited | None]) -> None:
    """Wait for each of them. None: there was nothing to wait for."""
    for work in works:
        if work is not None:
            work.wait()


def is_read(work: Awaited) -> bool:
    """Return whether a message is known to have been read. A socket does not tell."""
    return isinstance(work, OfferedTensors) and work.is_read()


Post = Callable[[Tensor, int, str], Awaited | None]  # memory, the other rank, and what both must agree on
# what comes and what goes, the other rank, and what both must agree on; None where memory is not read
Read = Callable[[Sequence[Tensor], Sequence[Tensor], int, str], tuple[Awaited | None, Awaited | None] | None]


class SentMessages:
    """Messages that were sent, each with its call and the memory that it is read from, by destination and key."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, Key], deque[tuple[CommunicationCall, Awaited, Tensor]]] = {}

    def add(self, call: CommunicationCall, work: Awaited, content: Tensor) -> None:
        self._sent.setdefault((call.ranks[1], call.key), deque()).append((call, work, content))

    def let_go(self) -> None:
        """Let go of those that are known to have been read."""
        for place, waiting in list(self._sent.items()):
            while waiting and is_read(waiting[0][1]):
                waiting.popleft()
            if not waiting:
                del self._sent[place]

    def settle(self, destination: int, key: Key | None) -> None:
        """Let go of one message of this key to `destination`, which has arrived."""
        waiting = None if key is None else self._sent.get((destination, key))
        if waiting:
            waiting.popleft()[1].wait()

    def finish(self, inside: Callable[[str], AbstractContextManager[None]]) -> None:
        """Wait until all have been read. `inside`: opened while one is waited for, with what is waited for."""
        for (destination, _), waiting in self._sent.items():
            while waiting:
                with inside(f"waits until rank {destination} takes: {waiting[0][0]}"):
                    waiting[0][1].wait()
                waiting.popleft()
        self._sent.clear()


class Outbox:
    """Messages of lasting calls, for which nothing waits before `settle`, with the memory that they read."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[Awaited, object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._leaving)

    def add(self, work: Awaited, memory: object) -> None:
        """Take a message, and let go of those that are known to have been read."""
        while self._leaving and is_read(self._leaving[0][0]):
            self._leaving.popleft()
        self._leaving.append((work, memory))

    def settle(self) -> None:
        """Wait until all have been read."""
        while self._leaving:
            self._leaving[0][0].wait()
            self._leaving.popleft()


class Arrival:
    """Messages under way, which several collectives may wait for."""

    def __init__(self) -> None:
        self._works: list[Awaited] = []
        self._kept: list[object] = []  # memory that they read

    def add(self, work: Awaited | None, memory: object) -> None:
        if work is not None:
            self._works.append(work)
            self._kept.append(memory)

    def wait(self) -> None:
        while self._works:  # what arrives first: what leaves may be read while it is waited for
            self._works[0].wait()
            self._works.pop(0)
        self._kept.clear()


@dataclass(eq=False)
class OneRound:
    """A collective of one round: each rank sends to every other one, and receives from it.

    outgoing  what each other rank is sent
    incoming  contiguous memory for what each other rank sends
    finish    makes the result of it
    """

    call: CommunicationCall
    outgoing: Mapping[int, Tensor]
    incoming: dict[int, Tensor]
    finish: Callable[[Mapping[int, Tensor]], None]
    arrivals: list[Awaited] = field(default_factory=list)

    def wait(self) -> None:
        """Return when the result is there."""
        for arrival in self.arrivals:
            arrival.wait()
        self.finish(self.incoming)


def gathering(call: CommunicationCall, own: Tensor, into: Sequence[Tensor], rank: int) -> OneRound:
    """Return the gather of tensors into places, which may be views."""
    places = dict(zip(call.ranks, into, strict=True))
    places.pop(rank).copy_(own)
    outgoing = dict.fromkeys(places, own)
    incoming = {other: t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype) for other, t in places.items()}

    def finish(arrived: Mapping[int, Tensor]) -> None:
        for other, place in places.items():
            if arrived[other] is not place:
                place.copy_(arrived[other])

    return OneRound(call, outgoing, incoming, finish)


def summing(call: CommunicationCall, pieces: Sequence[Tensor], into: Tensor, rank: int) -> OneRound:
    """Return the sum of this rank's pieces, in the order of the group."""
    outgoing = dict(zip(call.ranks, pieces, strict=True))
    own = outgoing.pop(rank)
    incoming = {other: torch.empty_like(own) for other in outgoing}

    def finish(arrived: Mapping[int, Tensor]) -> None:
        first, second, *rest = (own if other == rank else arrived[other] for other in call.ranks)
        torch.add(first, second, out=into)
        for part in rest:
            into.add_(part)

    return OneRound(call, outgoing, incoming, finish)


def post(
    exchanges: Sequence[OneRound],
    agreement: Callable[[CommunicationCall], str],
    send: Post,
    recv: Post,
    read: Read,
    outbox: Outbox,
) -> None:
    """Send and receive. What has one group shares messages: every rank of a group posts the same of it at once.

    From memory that is read, all of it is read at once. What goes of lasting calls is the `outbox`'s.
    """
    groups: dict[tuple[int, ...], list[OneRound]] = {}
    for exchange in exchanges:
        groups.setdefault(exchange.call.ranks, []).append(exchange)
    for together in groups.values():
        texts = [agreement(exchange.call) for exchange in together]
        shared = texts[0] if len(texts) == 1 else f"together {texts}"
        lasting = all(exchange.call.lasting for exchange in together)
        arrival, own = Arrival(), [Arrival() for _ in together]  # of what is shared, and of the rest
        for exchange, rest in zip(together, own, strict=True):
            exchange.arrivals = [arrival, rest]
        far: list[int] = []
        leaving: list[tuple[Awaited | None, list[Tensor]]] = []
        for peer in together[0].outgoing:
            coming, going = ([getattr(e, side)[peer] for e in together] for side in ("incoming", "outgoing"))
            begun = read(coming, going, peer, shared)
            if begun is None:
                far.append(peer)
                continue
            arrival.add(begun[0], coming)
            if lasting and begun[1] is not None:
                outbox.add(begun[1], going)
            else:
                leaving.append((begun[1], going))
        for work, given in leaving:  # after all that arrives: what leaves may be read while that is waited for
            arrival.add(work, given)
        for make, side in ((recv, "incoming"), (send, "outgoing")):
            for peer in far:
                tensors = [getattr(exchange, side) for exchange in together]
                small = [i for i, t in enumerate(tensors) if len(texts) > 1 and t[peer].nbytes <= SHARED_BYTES]
                if small:
                    memory, places = _message([tensors[i][peer] for i in small])
                    for i, place in zip(small, places, strict=True):
                        if side == "incoming":
                            together[i].incoming[peer] = place
                        else:
                            place.copy_(tensors[i][peer])
                    arrival.add(make(memory, peer, shared), memory)
                for i in (i for i in range(len(texts)) if i not in small):
                    own[i].add(make(tensors[i][peer], peer, texts[i]), tensors[i][peer])


def _message(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return memory for tensors, and where each of them lies in it."""
    lengths = [-(-t.nbytes // _ALIGNED) * _ALIGNED for t in tensors]
    memory = torch.empty(sum(lengths), dtype=torch.uint8)
    pieces = zip(memory.split(lengths), tensors, strict=True)
    return memory, [piece[: t.nbytes].view(t.dtype).view(t.shape) for piece, t in pieces]
