"""A copy of the batch in which every piece, of a rank and a micro-batch, has another number of labels that count.

A mean over labels is a sum and a count. A program that takes the mean of local means, or the count of one micro-batch,
is right as long as all counts are equal: and so a batch without ignored labels cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.runtime.role import MICRO, Input, Stage
from nnscaler.runtime.shards import logical_indices

# operator -> positions of the labels among its tensors, and of ignore_index among its arguments
_LOSSES: Mapping[str, tuple[int, int]] = {
    "nnscaler.ce_tail": (3, 4),
    "nnscaler.ce_count": (0, 1),
    "nnscaler.ce_weight": (0, 2),
    "aten.cross_entropy_loss.default": (1, 4),
}


@dataclass(frozen=True, slots=True)
class Labels:
    """The input that holds the labels of a loss, and the value of those that do not count."""

    name: str
    ignore_index: int


def find_labels(graph: Graph) -> Labels | None:
    """Return the labels of the first cross entropy whose labels are an input of the model; None if there is none."""
    for operation in graph.operations:
        found = _LOSSES.get(operation.operator)
        if found is None:
            continue
        tensor, position = found
        source = _source(graph, operation.inputs[tensor]) if tensor < len(operation.inputs) else None
        ignored = operation.args[position] if position < len(operation.args) else -100
        if source is not None and isinstance(ignored, int):
            return Labels(source, ignored)
    return None


def unequal(labels: Labels, batch: Mapping[str, Tensor], stages: Sequence[type[Stage]]) -> dict[str, Tensor] | None:
    """Return the batch with ever more labels ignored from piece to piece: the last has all that it had, the first none.

    None where the labels are not cut, or too few to differ.
    """
    pieces = _pieces(labels, batch[labels.name], stages)
    if len(pieces) < 2:
        return None
    changed = batch[labels.name].clone()
    for number, indices in enumerate(pieces):
        grid = torch.meshgrid(indices, indexing="ij")
        values = changed[grid].flatten()
        counted = (values != labels.ignore_index).nonzero().flatten()
        kept = len(counted) * number // (len(pieces) - 1)
        values[counted[kept:]] = labels.ignore_index
        changed[grid] = values.view(grid[0].shape)
    if not bool((changed != labels.ignore_index).any()):
        return None
    return {**batch, labels.name: changed}


def counts(labels: Labels, batch: Mapping[str, Tensor], stages: Sequence[type[Stage]]) -> list[int]:
    """Count the labels in each piece that are not ignored."""
    value = batch[labels.name]
    grids = (torch.meshgrid(indices, indexing="ij") for indices in _pieces(labels, value, stages))
    return [int((value[grid] != labels.ignore_index).sum()) for grid in grids]


def _source(graph: Graph, name: str) -> str | None:
    """Return the input that a tensor is a rearrangement of."""
    while True:
        tensor = graph.tensors[name]
        if tensor.role == "input":
            return name
        operation: Operation | None = graph.producers.get(name)
        if operation is None or facts_of(operation.operator).moves is None:
            return None
        name = operation.inputs[0]


def _pieces(labels: Labels, value: Tensor, stages: Sequence[type[Stage]]) -> list[list[Tensor]]:
    """Return the logical indices, per dim, of each piece into which the program cuts the labels; every micro-batch's
    too."""
    for stage in stages:
        declared = [source for source in stage.inputs.values() if source.name == labels.name]
        if declared:
            return _cut(declared[0], value, {**stage.axes, MICRO: stage.micro_batches})
    return []


def _cut(source: Input, value: Tensor, sizes: Mapping[str, int]) -> list[list[Tensor]]:
    found: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    for point in product(*(range(size) for size in sizes.values())):
        held = logical_indices(tuple(value.shape), source.states, sizes, dict(zip(sizes, point, strict=True)))
        indices = [torch.arange(n) if h is None else h for n, h in zip(value.shape, held, strict=True)]
        found.setdefault(tuple(tuple(i.tolist()) for i in indices), indices)
    return list(found.values())
