"""Activations kept for backward: for every operation, the inputs that it is the first to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature
from nnscaler.transform.saved_tensors import kept_slots


@dataclass(frozen=True, slots=True)
class Kept:
    """An activation that an operation keeps.

    slot    the input slot
    ratio   elements of the tensor that is kept per element of the slot, which may be a view of it
    """

    slot: int
    ratio: float


def kept_by(graph: Graph, signatures: Mapping[str, Signature]) -> dict[str, tuple[Kept, ...]]:
    """Return, by operation, the slots that are kept for it and for no earlier one.

    Several readers of one tensor keep it once.
    """
    base: dict[str, str] = {}
    seen: set[str] = set()
    found: dict[str, tuple[Kept, ...]] = {}
    for op in graph.operations:
        if facts_of(op.operator).view:
            shown = base.get(op.inputs[0], op.inputs[0])
            base.update((name, shown) for name in op.outputs if name is not None)
        kept = []
        recorded = op.region.grad_enabled and any(n is not None and graph.tensors[n].needs_grad for n in op.outputs)
        grads = [graph.tensors[name].needs_grad for name in op.inputs]
        for slot in kept_slots(op.operator, signatures[op.name].linear, grads) if recorded else ():
            tensor = graph.tensors[op.inputs[slot]]
            whole = graph.tensors[base.get(tensor.name, tensor.name)]
            if whole.role in ("activation", "input") and whole.name not in seen:
                seen.add(whole.name)
                kept.append(Kept(slot, whole.elements / max(tensor.elements, 1)))
        found[op.name] = tuple(kept)
    return found
