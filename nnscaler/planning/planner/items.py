"""Items of a graph, between which a pipeline may be cut: what is before the layers, each layer, what is after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.ir.graph import Graph

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
    to parameters only, a part where it leads to both sides (see `nnscaler.halves`)."""
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
