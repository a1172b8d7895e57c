"""Parameters that lie otherwise between steps than in them: ZeRO-1 and ZeRO-2, and master weights.

A parameter has a tensor at rest, which the optimizer and checkpoints see, and a leaf, which the program's text reads.
Where they differ, the leaf is made from the tensor at rest before the first forward: a cast, then the row `Sharded ->
Replicated` or `Sharded -> Invariant` of the conversion table for each axis of `rest`. The leaf's gradient goes back the
other way (`buckets`, `gradients`). Both work in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from nnscaler.buckets import gathered_together
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.role import Parameter, Stage
from nnscaler.runtime.shards import local_shape, logical_coordinates

Group = tuple[int, ...]
Slots = tuple[slice | Tensor, ...]  # where on a dim the part of each rank of an axis lies


@dataclass(frozen=True, slots=True)
class Division:
    """How one axis divides a local tensor between steps.

    group   the ranks of the axis here, in order
    index   of this rank among them
    dim     that is divided
    slots   where on that dim the part of each of them lies
    shapes  of the parts
    sums    the leaf's gradient is a partial sum over the axis, and not equal on its ranks
    whole   shape before the division
    """

    group: Group
    index: int
    dim: int
    slots: Slots
    shapes: tuple[tuple[int, ...], ...]
    sums: bool
    whole: tuple[int, ...]

    def part(self, tensor: Tensor, index: int) -> Tensor:
        """Return the part of the `index`-th rank."""
        slot = self.slots[index]
        if isinstance(slot, slice):
            return tensor.narrow(self.dim, slot.start, slot.stop - slot.start)
        return tensor.index_select(self.dim, slot.to(tensor.device))

    def put(self, tensor: Tensor, index: int, part: Tensor) -> None:
        """Write the part of the `index`-th rank into the whole."""
        slot = self.slots[index]
        if isinstance(slot, slice):
            tensor.narrow(self.dim, slot.start, slot.stop - slot.start).copy_(part)
        else:
            tensor.index_copy_(self.dim, slot.to(tensor.device), part)


@dataclass(frozen=True, slots=True)
class AtRest:
    """A parameter of this rank whose tensor at rest is not its leaf.

    leaf       that the text reads
    rest       that the optimizer updates
    divisions  of the leaf, the axis that is divided first first
    scatter    "micro_batch": its gradient is divided after each backward; "step": after the last
    """

    leaf: torch.nn.Parameter
    rest: torch.nn.Parameter
    divisions: tuple[Division, ...]
    scatter: str


def divisions_of(stage: Stage, description: Parameter) -> tuple[Division, ...]:
    """Return how the axes of `rest` divide the leaf of a parameter on this rank."""
    states = dict(description.states)
    sizes, here = stage.sizes(), stage.coordinates()
    found: list[Division] = []
    for axis, state in description.rest.items():
        whole = logical_coordinates(description.shape, states, sizes, here)
        states[axis] = state
        dim = state.dim  # type: ignore[union-attr]
        slots: list[slice | Tensor] = []
        shapes: list[tuple[int, ...]] = []
        for index in range(sizes[axis]):
            there = {**here, axis: index}
            held = logical_coordinates(description.shape, states, sizes, there)[dim]
            slots.append(_slot(torch.searchsorted(whole[dim], held)))
            shapes.append(local_shape(description.shape, states, sizes, there))
        group = getattr(stage, axis)
        sums = axis in description.reduce
        shape = tuple(len(indices) for indices in whole)
        found.append(Division(group.ranks, group.index, dim, tuple(slots), tuple(shapes), sums, shape))
    return tuple(found)


def _slot(positions: Tensor) -> slice | Tensor:
    first = int(positions[0]) if len(positions) else 0
    if len(positions) == 0 or int(positions[-1]) - first == len(positions) - 1:
        return slice(first, first + len(positions))
    return positions


def gather(resting: Sequence[AtRest], communicator: Communicator) -> None:
    """Make every leaf from the tensors at rest. Every rank calls it, with the parameters in one order."""
    values = [entry.rest.detach().to(entry.leaf.dtype) for entry in resting]
    for depth in reversed(range(max((len(entry.divisions) for entry in resting), default=0))):
        chosen = [i for i, entry in enumerate(resting) if len(entry.divisions) > depth]
        for bucket in _buckets(chosen, {i: resting[i].divisions[depth] for i in chosen}, values):
            divisions = [resting[i].divisions[depth] for i in bucket]
            flat = torch.cat([values[i].reshape(-1) for i in bucket])
            lengths = [(sum(_count(d.shapes[rank]) for d in divisions),) for rank in range(len(divisions[0].group))]
            pieces = communicator.all_gather(flat, divisions[0].group, lengths)
            wholes = [values[i].new_empty(d.whole) for i, d in zip(bucket, divisions, strict=True)]
            for index, piece in enumerate(pieces):
                parts = piece.split([_count(d.shapes[index]) for d in divisions])
                for whole, division, part in zip(wholes, divisions, parts, strict=True):
                    division.put(whole, index, part.view(division.shapes[index]))
            for i, whole in zip(bucket, wholes, strict=True):
                values[i] = whole
    with torch.no_grad():
        for entry, value in zip(resting, values, strict=True):
            entry.leaf.copy_(value)


def _buckets(
    chosen: Sequence[int], divisions: Mapping[int, Division], values: Sequence[Tensor] | Mapping[int, Tensor]
) -> Iterator[list[int]]:
    """Parameters that are divided over one group and have one dtype, a full bucket of them together.

    Groups come in one global order (by their ranks), so that ranks which share several of them meet in the same order.
    """

    def key(i: int) -> tuple[Group, str]:
        return divisions[i].group, str(values[i].dtype)

    for _, run in groupby(sorted(chosen, key=lambda i: (key(i), i)), key=key):
        found = list(run)  # weights are the same on every rank of the group
        for bucket in gathered_together([_count(divisions[i].whole) * values[i].element_size() for i in found]):
            yield [found[i] for i in bucket]


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
