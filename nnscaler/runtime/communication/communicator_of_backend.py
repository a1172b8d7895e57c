"""Make the communicator of a process by the name of its backend: gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnscaler.runtime.communication.communicator import CommunicationError
from nnscaler.runtime.communication.gloo import GlooCommunicator
from nnscaler.runtime.communication.join_process_group import store_of_ranks
from nnscaler.runtime.communication.long_waits import LongWaits
from nnscaler.runtime.communication.nccl import NcclCommunicator
from nnscaler.runtime.communication.torch_communicator_base import Reporter, TorchCommunicator


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
    """A communicator of the default process group, which exists already (`join_process_group.join`).

    backend: "gloo", or "nccl" with a CUDA device. groups: of the collectives; pairs, for NCCL only: of (source,
    destination) of messages. Both are the same on every rank. For NCCL, what groups and pairs do
    not name goes through host memory. reporter: None: one that tells of long waits on standard error.
    """
    reporter = reporter or LongWaits(rank, store=store_of_ranks())
    place = torch.device(device)
    if backend == "gloo":
        return GlooCommunicator(rank, world_size, place, reporter, groups=groups)
    if backend == "nccl":
        return NcclCommunicator(rank, world_size, place, reporter, groups=groups, pairs=pairs)
    raise CommunicationError(f"unknown backend {backend!r}: gloo or nccl")
