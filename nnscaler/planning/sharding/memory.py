"""What operations hold: for every operation the inputs that it is the first to keep for backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.ir.graph import Graph
from nnscaler.transform.kept import VIEWS, kept_slots
from nnscaler.transform.signature import Signature

HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Kept:
    """An input slot whose memory is kept; `ratio`: elements of what the view shows per element of the slot."""

    slot: int
    ratio: float


def kept_by(graph: Graph, signatures: Mapping[str, Signature]) -> dict[str, tuple[Kept, ...]]:
    """By operation, what is kept for it and for no earlier one. Several readers of one tensor keep it once."""
    base: dict[str, str] = {}
    seen: set[str] = set()
    found: dict[str, tuple[Kept, ...]] = {}
    for op in graph.operations:
        if op.operator in VIEWS:
            shown = base.get(op.inputs[0], op.inputs[0])
            base.update((name, shown) for name in op.outputs if name is not None)
        kept = []
        for slot in kept_slots(graph, op, signatures[op.name].linear):
            tensor = graph.tensors[op.inputs[slot]]
            whole = graph.tensors[base.get(tensor.name, tensor.name)]
            if whole.role in ("activation", "input") and whole.name not in seen:
                seen.add(whole.name)
                kept.append(Kept(slot, whole.elements / max(tensor.elements, 1)))
        found[op.name] = tuple(kept)
    return found


def bytes_of_parameter(dtype: str, itemsize: int, needs_grad: bool) -> int:
    """Of one element at rest: the value, and where it is trained a gradient and two moments in float32, with a copy in
    float32 of a value of half precision."""
    if not needs_grad:
        return itemsize
    return itemsize + 4 + 8 + 4 if dtype in HALF else itemsize + itemsize + 2 * itemsize
