"""ZeRO-1, ZeRO-2 and master weights: parameters that rest in shards or in another dtype between steps than in them.

A parameter has a tensor at rest, which the optimizer and checkpoints see, and a leaf, which the program's text reads.
Where they differ, the leaf is made from the tensor at rest before the first forward: a cast, then the row `Sharded ->
Replicated` or `Sharded -> Invariant` of the conversion table for each axis of `rest`. The leaf's gradient goes back the
other way (`buckets`, `gradients`). Both work in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from nnscaler.communication_buckets import gathered_together
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.shards import local_shape, logical_coordinates
from nnscaler.runtime.stage_base_class import Parameter, Stage

Group = tuple[int, ...]
Slots = tuple[slice | Tensor, ...]  # where on a dim the part of each rank of an axis lies


@dataclass(frozen=True, slots=True)
class Division:
    """How one axis divides a local tensor between steps.

    group   the ranks of the axis here, in order
    index   of this rank among them
    dim     that is divided
    slots   where on that dim the part of each of them lies
    like    tensors without memory in the shapes of the parts
    lengths of the parts on that dim, where they lie in the order of the ranks and side by side; else None
    sums    the leaf's gradient is a partial sum over the axis, and not equal on its ranks
    whole   shape before the division
    """

    group: Group
    index: int
    dim: int
    slots: Slots
    like: tuple[Tensor, ...]
    lengths: tuple[int, ...] | None
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

    def cut(self, tensor: Tensor, places: tuple[Tensor, ...]) -> None:
        """Copy the part of each rank to its place."""
        parts = self._views(tensor)
        if parts is None:
            parts = [self.part(tensor, index) for index in range(len(places))]
        torch._foreach_copy_(places, parts)  # one call for all: most parameters of a model are small

    def _views(self, tensor: Tensor) -> list[Tensor] | None:
        """Return the part of each rank, where they lie in the order of the ranks and side by side."""
        return None if self.lengths is None else list(torch.split_with_sizes(tensor, self.lengths, self.dim))


def join(divisions: Sequence[Division], wholes: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """Write the parts of all ranks into wholes."""
    places: list[Tensor] = []
    found: list[Tensor] = []
    for division, whole, own in zip(divisions, wholes, parts, strict=True):
        views = division._views(whole)
        if views is None:
            for index, part in enumerate(own):
                division.put(whole, index, part)
        else:
            places += views
            found += own
    if places:
        torch._foreach_copy_(places, found)


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of flat memory, one after the other, in the shapes of these."""
    found: tuple[Tensor, ...] = torch._utils._unflatten_dense_tensors(flat, like)
    if all(map(Tensor.numel, like)):
        return found
    return tuple(view.view(part.shape) for view, part in zip(found, like, strict=True))  # not each torch keeps (0, n)


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
        like: list[Tensor] = []
        for index in range(sizes[axis]):
            there = {**here, axis: index}
            held = logical_coordinates(description.shape, states, sizes, there)[dim]
            slots.append(_slot(torch.searchsorted(whole[dim], held)))
            like.append(torch.empty(local_shape(description.shape, states, sizes, there), device="meta"))
        group = getattr(stage, axis)
        sums = axis in description.reduce
        shape = tuple(len(indices) for indices in whole)
        lengths = _side_by_side(slots, shape[dim])
        found.append(Division(group.ranks, group.index, dim, tuple(slots), tuple(like), lengths, sums, shape))
    return tuple(found)


def _slot(positions: Tensor) -> slice | Tensor:
    first = int(positions[0]) if len(positions) else 0
    if len(positions) == 0 or int(positions[-1]) - first == len(positions) - 1:
        return slice(first, first + len(positions))
    return positions


def _side_by_side(slots: Sequence[slice | Tensor], size: int) -> tuple[int, ...] | None:
    lengths, end = [], 0
    for slot in slots:
        if not isinstance(slot, slice) or (slot.start != end and slot.start != slot.stop):
            return None
        lengths.append(slot.stop - slot.start)
        end += lengths[-1]
    return tuple(lengths) if end == size else None


@torch.no_grad()
def gather(resting: Sequence[AtRest], communicator: Communicator) -> None:
    """Make every leaf from the tensors at rest. Every rank calls it, with the parameters in one order."""
    values = [entry.rest.detach().to(entry.leaf.dtype) for entry in resting]
    for depth in reversed(range(max((len(entry.divisions) for entry in resting), default=0))):
        chosen = [i for i, entry in enumerate(resting) if len(entry.divisions) > depth]
        for bucket in _buckets(chosen, {i: resting[i].divisions[depth] for i in chosen}, values):
            divisions = [resting[i].divisions[depth] for i in bucket]
            like = list(zip(*(d.like for d in divisions), strict=True))  # by rank
            flat = torch.cat([values[i].reshape(-1) for i in bucket])
            lengths = [(sum(part.numel() for part in own),) for own in like]
            pieces = communicator.all_gather(flat, divisions[0].group, lengths)
            wholes = [
                resting[i].leaf.detach() if depth == 0 else values[i].new_empty(resting[i].divisions[depth].whole)
                for i in bucket
            ]
            join(divisions, wholes, list(zip(*map(unflattened, pieces, like), strict=True)))
            for i, whole in zip(bucket, wholes, strict=True):
                values[i] = whole
    for entry, value in zip(resting, values, strict=True):
        if not entry.divisions:
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
        for bucket in gathered_together([prod(divisions[i].whole) * values[i].element_size() for i in found]):
            yield [found[i] for i in bucket]
