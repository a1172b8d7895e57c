"""A shard as boxes of its logical tensor: one, or several where it is strided."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from torch import Tensor

from nnscaler.runtime.layout import Sharded
from nnscaler.runtime.shards import logical_indices
from nnscaler.runtime.training.saving.stored import StoredTensor


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
        if indices is None:
            runs.append([(0, 0, size)] if size else [])
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
