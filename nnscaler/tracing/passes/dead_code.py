"""Operations whose results nobody uses disappear, and so do results and constants that nobody uses."""

from __future__ import annotations

from dataclasses import replace

from nnscaler.ir.graph import Graph


def remove_dead_code(graph: Graph) -> Graph:
    """Keep what the loss and the updates need. Parameters, buffers and inputs stay, used or not."""
    used = {graph.loss, *(value for _, value in graph.updates)}
    kept = []
    for operation in reversed(graph.operations):
        outputs = tuple(name if name in used else None for name in operation.outputs)
        if any(name is not None for name in outputs):
            kept.append(replace(operation, outputs=outputs))
            used.update(operation.inputs)
    always = ("parameter", "buffer", "input")
    tensors = {name: t for name, t in graph.tensors.items() if name in used or t.role in always}
    return graph.replace(tensors=tensors, operations=tuple(reversed(kept)))
