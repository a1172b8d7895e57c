"""The whole model on every rank: the shards of all of them, put together."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training.saving.boxes import boxes_of
from nnscaler.runtime.training.saving.stored import StoredTensor


def gathered_state(stored: Sequence[StoredTensor], communicator: Communicator) -> dict[str, Tensor]:
    """Return the logical tensors by every name, on the CPU. `stored`: what this rank holds. Every rank calls this.

    Each element comes from the rank that holds its first copy; one tensor at a time is sent.
    """
    device = getattr(communicator, "device", "cpu")
    held = {entry.fqn: entry for entry in stored if entry.first}
    mine = {e.fqn: (e.names, e.shape, e.tensor.dtype, boxes_of(e)) for e in held.values()}
    told = _everyones(mine, communicator, device)
    whole: dict[str, Tensor] = {}
    for fqn in dict.fromkeys(name for theirs in told for name in theirs):
        names, shape, dtype, _ = next(theirs[fqn] for theirs in told if fqn in theirs)
        boxes = [theirs[fqn][3] if fqn in theirs else () for theirs in told]
        own = [box.of(held[fqn].tensor.detach()).reshape(-1) for box in boxes[communicator.rank]]
        # as bytes: not every backend knows every dtype
        flat = torch.cat([torch.empty(0, dtype=dtype, device=device), *own]).view(torch.uint8)
        lengths = [sum(prod(box.sizes) for box in theirs) * dtype.itemsize for theirs in boxes]
        tensor = torch.empty(shape, dtype=dtype)
        for theirs, part in zip(boxes, _gathered(flat, lengths, communicator), strict=True):
            values, place = part.cpu().view(dtype), 0
            for box in theirs:
                where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                tensor[where] = values[place : place + prod(box.sizes)].reshape(box.sizes)
                place += prod(box.sizes)
        whole.update(dict.fromkeys(names, tensor))
    return whole


def _everyones(value: Any, communicator: Communicator, device: torch.device | str) -> list[Any]:
    """Return the values of all ranks."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    everyone = tuple(range(communicator.world_size))
    lengths = communicator.all_gather(torch.tensor([len(data)], device=device), everyone)
    found = _gathered(data, [int(length) for length in lengths], communicator)
    return [pickle.loads(part.cpu().numpy().tobytes()) for part in found]


def _gathered(data: Tensor, lengths: Sequence[int], communicator: Communicator) -> list[Tensor]:
    return communicator.all_gather(data, tuple(range(communicator.world_size)), [(length,) for length in lengths])
