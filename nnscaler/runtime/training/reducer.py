"""Sum the gradients that different ranks hold parts of, once per step, in buckets.

A gradient is summed over the ranks that differ from this one only on the parameter's `reduce` axes, in every stage
that holds a copy of it. Parameters with the same group and dtype share buckets. Every rank works through its groups in
one global order (by their ranks), so two ranks that share several groups meet in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.role import Parameter, Stage
from nnscaler.runtime.shards import unravel

BUCKET_BYTES = 25 * 2**20
_NAMED = 3  # parameters of a bucket that an error names


@dataclass(frozen=True, slots=True)
class Holding:
    """One local tensor of a parameter: which one, and the ranks (in order) whose gradients add up to its gradient."""

    fqn: str
    group: tuple[int, ...]


def holding(stage: Stage, description: Parameter) -> Holding:
    """Return where the gradient of this stage's shard of a parameter is summed."""
    here = unravel(stage.ranks.index(stage.rank), stage.axes)
    kept = [axis for axis in stage.axes if axis not in description.reduce]
    positions = [
        position
        for position in range(len(stage.ranks))
        if all(unravel(position, stage.axes)[axis] == here[axis] for axis in kept)
    ]
    copies = description.copies or (tuple(stage.ranks),)
    return Holding(description.fqn, tuple(sorted({copy[position] for copy in copies for position in positions})))


def reduce_gradients(
    gradients: Sequence[tuple[Holding, Tensor]], communicator: Communicator, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Sum the gradients, and return them in the order given.

    Gradients with equal holdings are several local copies of one shard: they are added first, and all get the sum.
    """
    local: dict[tuple[tuple[int, ...], str, Holding], Tensor] = {}
    for held, gradient in gradients:
        key = (held.group, str(gradient.dtype), held)
        local[key] = local[key] + gradient if key in local else gradient
    order = sorted(local, key=lambda key: (key[0], key[1], key[2].fqn))
    summed: dict[tuple[tuple[int, ...], str, Holding], Tensor] = {}
    for bucket in _buckets(order, local, bucket_bytes):
        group = bucket[0][0]
        values = [local[key] for key in bucket]
        if len(group) > 1:
            with _told(communicator, bucket):
                values = _reduce_together(values, group, communicator)
        summed.update(zip(bucket, values, strict=True))
    return [summed[held.group, str(gradient.dtype), held] for held, gradient in gradients]


@contextmanager
def _told(communicator: Communicator, bucket: Sequence[tuple[tuple[int, ...], str, Holding]]) -> Iterator[None]:
    """Calls inside are recorded with the parameters whose gradients they sum."""
    named, more = [f"`{key[2].fqn}`" for key in bucket[:_NAMED]], len(bucket) - _NAMED
    before = communicator.context
    communicator.context = f"the gradient sum of {', '.join(named)}" + (f" and {more} more" if more > 0 else "")
    try:
        yield
    finally:
        communicator.context = before


def _buckets(
    order: Sequence[tuple[tuple[int, ...], str, Holding]],
    values: dict[tuple[tuple[int, ...], str, Holding], Tensor],
    bucket_bytes: int,
) -> list[list[tuple[tuple[int, ...], str, Holding]]]:
    """Consecutive keys with one group and dtype, up to `bucket_bytes` each (a larger tensor is a bucket of its own)."""
    buckets: list[list[tuple[tuple[int, ...], str, Holding]]] = []
    size = 0
    for key in order:
        weight = values[key].numel() * values[key].element_size()
        fits = bool(buckets) and buckets[-1][0][:2] == key[:2] and size + weight <= bucket_bytes
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(key)
        size += weight
    return buckets


def _reduce_together(values: Sequence[Tensor], group: tuple[int, ...], communicator: Communicator) -> list[Tensor]:
    if len(values) == 1:
        return [communicator.all_reduce(values[0], group)]
    flat = communicator.all_reduce(torch.cat([v.reshape(-1) for v in values]), group)
    pieces = flat.split([v.numel() for v in values])
    return [piece.view(value.shape).clone() for piece, value in zip(pieces, values, strict=True)]
