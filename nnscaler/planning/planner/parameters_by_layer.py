"""The parameters that each layer reads, and which of them surely rest in shards where parameters do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nnscaler.ir.graph import Graph, LogicalTensor, element_bytes, gradient_dtype

Counted = tuple[tuple[LogicalTensor, int], ...]  # parameters, each with how many are like it


@dataclass(frozen=True)
class ParametersByLayer:
    """
    groups      by operation in a layer, the number of the layer
    items       by operation, its item (see `items`)
    layers      how many layers the model has
    elsewhere   operations that other ranks run
    """

    graph: Graph
    groups: Mapping[str, int]
    items: Mapping[str, int]
    layers: int
    elsewhere: Collection[str]
    _gathered: dict[tuple[int, int | None], Counted] = field(default_factory=dict)
    _uncut: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def gathered(self, dp: int, layer: int | None = None) -> Counted:
        """Return parameters that ranks gather where they rest in shards.

        `layer` restricts it to parameters that only this layer reads (None: all parameters). Counted are only those
        that can be sharded over dp whichever dim tp splits.
        """
        key = (dp, layer)
        if key not in self._gathered:
            found: dict[tuple[object, ...], tuple[LogicalTensor, int]] = {}
            for tensor in self.graph.with_role("parameter"):
                uses = [op.name for op, _ in self.graph.consumers[tensor.name] if op.name not in self.elsewhere]
                readers = {self.groups.get(name, -1) for name in uses}
                if readers and _surely_cut(tensor, dp) and (layer is None or readers == {layer}):
                    like = (tensor.shape, tensor.dtype, tensor.needs_grad)
                    first, count = found.get(like, (tensor, 0))
                    found[like] = first, count + 1
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
