"""Records of the tensors that a rank holds between steps, for checkpoints, optimizers and checks of replicas; each as
boxes of its logical tensor: one, or several where it is strided."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.layout import Sharded, States
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.shards import logical_indices
from nnscaler.runtime.stage_base_class import INPUT_GRADIENT, Buffer, Parameter, Stage
from nnscaler.runtime.tensor_bits_and_differences import bits_of
from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import holds_first_copy


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer as one rank holds it between steps.

    fqn          its first name in the model
    names        all its names
    shape        logical
    states       between steps, by axis
    sizes        of the mesh axes
    coordinates  of this rank on them
    tensor       this rank's shard; the very object that the optimizer updates
    kind         "parameter", "frozen" or "buffer"
    first        no rank before this one, and no stage before, holds the same elements
    read         an operation of the program reads it
    """

    fqn: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    states: States
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    tensor: Tensor
    kind: str
    first: bool
    read: bool = True


def stored_tensors(stages: Sequence[Stage], tied: Sequence[Sequence[str]] = ()) -> list[StoredTensor]:
    """Return what these stages of one rank hold, each tensor once, in the order of the model's stages.

    `tied`: all names of each tensor that has several.
    """
    names = {name: tuple(group) for group in tied for name in group}
    found: dict[int, StoredTensor] = {}
    for stage in stages:
        sizes, here = stage.sizes(), stage.coordinates()
        groups: tuple[tuple[str, Mapping[str, Parameter | Buffer]], ...] = (
            ("parameter", stage.parameters),
            ("frozen", stage.frozen),
            ("buffer", stage.buffers),
        )
        for kind, declared in groups:
            for attribute, description in declared.items():
                if description.fqn.startswith(INPUT_GRADIENT):
                    continue  # nothing that is kept
                tensor = getattr(stage, attribute) if kind == "buffer" else stage.at_rest[attribute]
                known = found.get(id(tensor))
                first = holds_first_copy(stage, description) or (known is not None and known.first)
                found[id(tensor)] = StoredTensor(
                    description.fqn,
                    names.get(description.fqn, (description.fqn,)),
                    tuple(description.shape),
                    {axis: state for axis, state in description.at_rest.items() if axis in sizes},
                    sizes,
                    here,
                    tensor,
                    kind,
                    first,
                    read=isinstance(description, Buffer) or description.used,
                )
    return list(found.values())


def held_by_one(entries: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Return each tensor of the model once, of what several programs over the same parameters hold on a rank.

    A program that does not read a tensor may have one of its own in its place, which nothing changes: those that read
    it come first, and of them those that train it.
    """
    found: dict[str, StoredTensor] = {}
    for entry in entries:
        known = found.get(entry.fqn)
        if known is None or (entry.read, entry.kind == "parameter") > (known.read, known.kind == "parameter"):
            found[entry.fqn] = entry
    return list(found.values())


def trained_tensors(stages: Iterable[Stage]) -> dict[str, nn.Parameter]:
    """Return what these stages of one rank train, by name in the model: the first that has a tensor counts."""
    found: dict[str, nn.Parameter] = {}
    for stage in stages:
        for attribute, description in stage.parameters.items():
            if not description.fqn.startswith(INPUT_GRADIENT):
                found.setdefault(description.fqn, stage.at_rest[attribute])
    return found


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a logical tensor that lies as a box in a rank's tensor: where it begins in each, and its size."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the box in a rank's tensor; a view."""
        for dim, (start, size) in enumerate(zip(self.local, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def boxes_of(stored: StoredTensor) -> tuple[Box, ...]:
    """Return the boxes of the logical tensor that a rank holds; none where its shard is empty."""
    runs: list[list[tuple[int, int, int]]] = []  # of each dim: first logical index, first local one, length
    held = logical_indices(stored.shape, stored.states, stored.sizes, stored.coordinates)
    for size, indices in zip(stored.shape, held, strict=True):
        if indices is None or not size:  # a tensor without elements is a box as well
            runs.append([(0, 0, size)])
            continue
        breaks = (indices.diff() != 1).nonzero().flatten() + 1
        starts = [0, *breaks.tolist()] if len(indices) else []
        ends = [*starts[1:], len(indices)]
        runs.append([(int(indices[a]), a, b - a) for a, b in zip(starts, ends, strict=False)])
    return tuple(
        Box(tuple(r[0] for r in point), tuple(r[1] for r in point), tuple(r[2] for r in point))
        for point in product(*runs)
    )


def leads(stored: StoredTensor) -> bool:
    """Return whether this is the first copy of the first shard with elements: one rank holds that of a parameter."""
    sharded = [(axis, state) for axis, state in stored.states.items() if isinstance(state, Sharded)]
    leading = {axis: next((i for i, size in enumerate(state.sizes) if size), 0) for axis, state in sharded}
    return stored.first and all(stored.coordinates[axis] == index for axis, index in leading.items())


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
        flat = bits_of(torch.cat([torch.empty(0, dtype=dtype, device=device), *own]))
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
