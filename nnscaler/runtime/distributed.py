"""Communicators between processes, over torch.distributed. `torch_communicator` chooses; gloo and NCCL differ.

What both share is here: each call is reported to a `Reporter` (what a hung rank was doing), and torch's errors become
`CommunicationError`s that name the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from nnscaler.runtime.communicator import CommunicationCall, CommunicationError, CommunicatorBase


class Reporter(Protocol):
    """Is told when a rank enters and leaves a communication call. `status.StatusWriter` is one."""

    def communicating(self, text: str) -> None: ...
    def computing(self) -> None: ...


class TorchCommunicator(CommunicatorBase):
    """One rank of torch.distributed's default process group. Received tensors are on `device`."""

    def __init__(self, rank: int, world_size: int, device: torch.device, reporter: Reporter | None = None) -> None:
        super().__init__(rank, world_size)
        self.device = device
        self._reporter = reporter

    @contextmanager
    def _inside(self, call: CommunicationCall | str) -> Iterator[None]:
        """Communication inside is reported as `call`; its errors are raised as CommunicationErrors that name it."""
        if self._reporter is not None:
            self._reporter.communicating(str(call))
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            # The peer's connection closes when its process ends: the cause is there, not here.
            secondary = any(sign in reason for sign in ("closed by peer", "reset by peer", "Broken pipe"))
            message = f"rank {self.rank}: {call}: {reason}"
            raise CommunicationError(message, secondary=secondary) from error
        if self._reporter is not None:
            self._reporter.computing()

    def close(self) -> None:
        """Waits until messages have left; the communicator is not used afterwards."""
        self.finish()


def reduce_in_order(tensors: Sequence[Tensor], reduction: str) -> Tensor:
    """Reduce the tensors in their order: the same bits wherever it is computed."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = torch.maximum(total, tensor) if reduction == "max" else total.add_(tensor)
    return total


def torch_communicator(
    backend: str,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    *,
    groups: Sequence[Sequence[int]] = (),
    pairs: Sequence[tuple[int, int]] = (),
    reporter: Reporter | None = None,
) -> TorchCommunicator:
    """Make a communicator of the default process group, which exists already (`process_group.join`).

    backend: "gloo", or "nccl" with a CUDA device. groups and pairs, for NCCL only: the groups of collectives and the
    (source, destination) pairs of messages, the same on every rank. Groups that are not named are made when they are
    first used; messages of pairs that are not named go through host memory.
    """
    from nnscaler.runtime.gloo_communicator import GlooCommunicator
    from nnscaler.runtime.nccl_communicator import NcclCommunicator

    place = torch.device(device)
    if backend == "gloo":
        return GlooCommunicator(rank, world_size, place, reporter)
    if backend == "nccl":
        return NcclCommunicator(rank, world_size, place, reporter, groups=groups, pairs=pairs)
    raise CommunicationError(f"unknown backend {backend!r}: gloo or nccl")
