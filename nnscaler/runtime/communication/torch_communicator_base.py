"""The base class of communicators over torch.distributed: what they share, whatever the backend.

Each call is reported to a `Reporter` (what a hung rank was doing), and torch's errors become `CommunicationError`s that
name the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from nnscaler.exception_in_one_line import first_line
from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError, Communicator, Key


class Reporter(Protocol):
    """Is told when a rank enters and leaves a communication call. `StatusWriter` is one, and `LongWaits`."""

    def communicating(self, call: object) -> None: ...
    def computing(self) -> None: ...


class TorchCommunicator(Communicator):
    """One rank of torch.distributed's default process group. Received tensors are on `device`."""

    def __init__(self, rank: int, world_size: int, device: torch.device, reporter: Reporter | None = None) -> None:
        super().__init__(rank, world_size)
        self.device = device
        self._reporter = reporter

    @contextmanager
    def _inside(self, call: CommunicationCall | str) -> Iterator[None]:
        """Communication inside is reported as `call`; its errors are raised as CommunicationErrors that name it."""
        if self._reporter is not None:
            self._reporter.communicating(call)
        try:
            yield
        except RuntimeError as error:
            reason = first_line(error) or type(error).__name__
            # The peer's connection closes when its process ends: the cause is there, not here.
            secondary = any(sign in reason for sign in ("closed by peer", "reset by peer", "Broken pipe"))
            message = f"rank {self.rank}: {call}: {reason}"
            raise CommunicationError(message, secondary=secondary) from error
        if self._reporter is not None:
            self._reporter.computing()

    def close(self) -> None:
        """Waits until messages have left; the communicator is not used afterwards."""
        self.finish()


def agreement_of(call: CommunicationCall) -> str:
    """Return the part of a call that sender and receiver, or all ranks of a collective, have in common."""
    kind = "message" if call.kind in ("send", "recv") else call.kind
    agreed = (kind, call.ranks, call.shapes, call.dtype, call.reduction, call.source, call.key)
    return _text((*agreed, "begun") if call.begun else agreed)


_text = lru_cache(maxsize=4096)(repr)  # each step agrees on the same


def reduce_in_order(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Reduce the tensors in their order: the same bits wherever it is computed."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = torch.maximum(total, tensor) if reduction == "max" else total.add_(tensor)
    return total


def add_in_order(tensors: Sequence[Tensor], own: Tensor) -> None:
    """Add the tensors up in their order, into `own`, which is one of them; the others are lost."""
    first, second, *rest = tensors
    total = second.add_(first) if second is own else first.add_(second)  # of two, the order makes no difference
    for tensor in rest:
        total.add_(tensor)
    if total is not own:
        own.copy_(total)


def neighbours(ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ranks before and after this one on the ring of a group."""
    here = ranks.index(rank)
    return ranks[here - 1], ranks[(here + 1) % len(ranks)]


def forward_of(key: Key) -> Key | None:
    """Return the key of the message whose gradient has `key`; None if `key` is not a gradient's.

    A gradient comes back only after its message has arrived.
    """
    return _turned(key, "B", "F")


def gradient_of(key: Key) -> Key | None:
    """Return the key of the gradient of the message that has `key`; None if `key` is a gradient's.

    In a stream, where batches far apart have the same keys, a message comes only after the gradient that was sent back
    for the last one of its key has arrived.
    """
    return _turned(key, "F", "B")


def _turned(key: Key, way: str, other: str) -> Key | None:
    for place in (len(key) - 1, len(key) - 2):  # a number may follow the direction
        if place >= 0 and key[place] == way:
            return (*key[:place], other, *key[place + 1 :])
    return None
