"""The tensors that a rank holds between steps, each with where it lies in its logical tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from nnscaler.runtime.layout import Sharded, State
from nnscaler.runtime.role import Stage
from nnscaler.runtime.shards import logical_indices
from nnscaler.runtime.training.gradients import holds_first_copy


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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A parameter or buffer between steps, as one rank holds it.

    fqn          its name in the program
    names        all its names in the model; a tied one has several
    shape        of the logical tensor
    states       by axis
    sizes        of the axes
    coordinates  of this rank
    tensor       its shard
    kind         "parameter", "frozen" or "buffer"
    first        this rank holds the first copy of these elements
    """

    fqn: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    states: Mapping[str, State]
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    tensor: Tensor
    kind: str
    first: bool

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes of the logical tensor that the shard is made of: several where it is strided."""
        return boxes_of(self.shape, self.states, self.sizes, self.coordinates)

    @property
    def leads(self) -> bool:
        """Return whether this is the first copy of the first shard: exactly one rank holds that."""
        return self.first and not any(
            self.coordinates[axis] for axis, state in self.states.items() if isinstance(state, Sharded)
        )


def boxes_of(
    shape: Sequence[int], states: Mapping[str, State], sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[Box, ...]:
    """Return the boxes of a logical tensor that a rank holds, in the order of its shard."""
    runs: list[list[tuple[int, int, int]]] = []  # of each dim: first logical index, first local one, length
    for size, indices in zip(shape, logical_indices(shape, states, sizes, coordinates), strict=True):
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


def stored_tensors(stages: Iterable[Stage], tied: Iterable[Sequence[str]] = ()) -> list[StoredTensor]:
    """Return what the stages of a rank hold between steps. A tensor that two stages share on this rank comes once."""
    names = {name: tuple(group) for group in tied for name in group}
    found: dict[tuple[str, int], StoredTensor] = {}
    for stage in stages:
        declared = [("parameter", stage.parameters), ("frozen", stage.frozen), ("buffer", stage.buffers)]
        for kind, descriptions in declared:
            for attribute, description in descriptions.items():
                tensor = getattr(stage, attribute) if kind == "buffer" else stage.at_rest[attribute]
                fqn, first = description.fqn, holds_first_copy(stage, description)
                before = found.get((fqn, id(tensor)))
                if before is not None and (before.first or not first):
                    continue
                found[fqn, id(tensor)] = StoredTensor(
                    fqn,
                    names.get(fqn, (fqn,)),
                    tuple(description.shape),
                    description.at_rest,
                    stage.sizes(),
                    stage.coordinates(),
                    tensor,
                    kind,
                    first,
                )
    return list(found.values())
