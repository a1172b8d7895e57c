"""Divide a graph into layer items, between which a pipeline may be cut, and find the parameters that each layer reads.

Items are what is before the layers, each layer, and what is after them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nnscaler.ir.graph import Graph, LogicalTensor, element_bytes, gradient_dtype

BOTH = 0.5  # an operator takes as long for the gradients of one side as for those of the other


@dataclass(frozen=True, slots=True)
class Repeated:
    """Layers between the first and the last that are all alike.

    window   the layers that stand for all of them in bounds
    around   the first layer of the window with a neighbour on either side
    times    how many windows these layers make
    """

    window: range
    around: range
    times: int


def items_of_operations(graph: Graph, groups: Mapping[str, int], layers: int) -> dict[str, int]:
    """Return, by operation, its item: 0 before the layers, i + 1 in or after layer i, one more after the last layer.

    `groups`: by operation in a layer, the number of the layer.
    """
    last = max((i for i, op in enumerate(graph.operations) if op.name in groups), default=-1)
    found: dict[str, int] = {}
    here = 0
    for i, op in enumerate(graph.operations):
        here = max(here, groups.get(op.name, here - 1) + 1)
        found[op.name] = here if i <= last else layers + 1
    return found


def halves_of_items(graph: Graph, items: Mapping[str, int]) -> dict[str, float]:
    """Return, by operation, the share of its backward that W takes where each item is a stage: all of it where it leads
    to parameters only, a part where it leads to both sides (see `nnscaler.split_backward_graph`)."""
    made: dict[str, tuple[int, bool]] = {}  # by tensor: its item, and whether it leads to what the item received
    found = {}
    for op in graph.operations:
        item = items[op.name]
        leads = [
            made[name][0] < item or made[name][1] if name in made else False
            for name in op.inputs
            if graph.tensors[name].needs_grad
        ]
        found[op.name] = 1.0 if not any(leads) else 0.0 if all(leads) else BOTH
        made.update((name, (item, any(leads))) for name in op.outputs if name is not None)
    return found


Counted = tuple[tuple[LogicalTensor, bool, int], ...]  # parameters, whether backward reads them, and how many are alike


@dataclass(frozen=True)
class ParametersByLayer:
    """
    groups      by operation in a layer, the number of the layer
    items       by operation, its item (see `items_of_operations`)
    layers      how many layers the model has
    elsewhere   operations that other ranks run
    read_back   parameters that backward reads
    """

    graph: Graph
    groups: Mapping[str, int]
    items: Mapping[str, int]
    layers: int
    elsewhere: Collection[str]
    read_back: Collection[str]
    _gathered: dict[tuple[int, int | None], Counted] = field(default_factory=dict)
    _uncut: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def gathered(self, dp: int, layer: int | None = None) -> Counted:
        """Return parameters that ranks gather where they rest in shards.

        `layer` restricts it to parameters that only this layer reads (None: all parameters). Counted are only those
        that can be sharded over dp whichever dim tp splits.
        """
        key = (dp, layer)
        if key not in self._gathered:
            found: dict[tuple[object, ...], tuple[LogicalTensor, bool, int]] = {}
            for tensor in self.graph.with_role("parameter"):
                uses = [op.name for op, _ in self.graph.consumers[tensor.name] if op.name not in self.elsewhere]
                readers = {self.groups.get(name, -1) for name in uses}
                if readers and _surely_cut(tensor, dp) and (layer is None or readers == {layer}):
                    back = tensor.name in self.read_back
                    like = (tensor.shape, tensor.dtype, tensor.needs_grad, back)
                    first, _, count = found.get(like, (tensor, back, 0))
                    found[like] = first, back, count + 1
            self._gathered[key] = tuple(found.values())
        return self._gathered[key]

    def uncut(self, dp: int) -> tuple[float, float, float]:
        """Return the most bytes of gradients of parameters that may rest whole where others rest in shards: of those
        read up to the end of the first layer, by a layer in the middle, and from the last layer on."""
        if dp not in self._uncut:
            head, layer, tail, last = 0.0, 0.0, 0.0, self.layers
            for tensor in self.graph.with_role("parameter"):
                if tensor.needs_grad and not _surely_cut(tensor, dp):
                    items = {self.items[op.name] for op, _ in self.graph.consumers[tensor.name]}
                    size = tensor.elements * element_bytes(gradient_dtype(tensor.dtype))
                    head += size * any(item <= 1 for item in items)
                    layer += size * (1 + last // 2 in items)
                    tail += size * any(item >= last for item in items)
            self._uncut[dp] = head, layer, tail
        return self._uncut[dp]


def _surely_cut(tensor: LogicalTensor, dp: int) -> bool:
    """Return whether a parameter can be cut over dp whichever dim tp splits."""
    return sum(size >= dp for size in tensor.shape) > 1
