"""Activations kept for backward: for every operation, the inputs that it is the first to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.registry import facts_of

from nnscaler.errors import NnscalerError
from nnscaler.ir.gradient_flow import kept_slots, records
from nnscaler.ir.graph import HALF, Graph, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature

# Memory of a parameter on one rank, in bytes, with its gradient and optimizer states.

OPTIMIZER_BYTES = 8  # of an element that is trained: both moments of Adam, in float32
_COPY_BYTES = 4  # of a float32 copy


def bytes_of_optimizer(told: float | None) -> float:
    """Return the bytes that an optimizer keeps of an element: as told, else those of Adam.

    Raises NnscalerError("plan_illegal") for fewer than none.
    """
    if told is not None and told < 0:
        message = f"an optimizer cannot keep {told:g} bytes of an element"
        raise NnscalerError("plan_illegal", message, help="8 for Adam's two float32 moments, 4 for one, 0 for none")
    return OPTIMIZER_BYTES if told is None else told


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of a plan.

    limit      bytes of a device; None: what the cluster says
    optimizer  bytes that the optimizer keeps of an element; None: two float32 moments, as Adam does
    """

    limit: float | None = None
    optimizer: float | None = None


CLUSTERS_MEMORY = MemoryBudget()  # all that the cluster has


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """Bytes on one rank.

    parameters   values, at rest and as they are read where that is another tensor
    gradients    of the dtype that gradients have
    optimizer    states, and a float32 copy of values that rest in half precision
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def parameter_memory(
    elements: int,
    dtype: str,
    trainable: bool = True,
    *,
    rest: int | None = None,
    master: str = "",
    divided: bool = False,
    optimizer: float = OPTIMIZER_BYTES,
) -> ParameterMemory:
    """Return the memory of a parameter of which a rank reads so many elements of this dtype.

    rest       how many of them rest on the rank between steps; None: all
    master     dtype in which they rest; empty: `dtype`
    divided    gradients are added up as the parameter rests, and not as it is read
    optimizer  bytes that the optimizer keeps of an element at rest

    Gradients of half precision are accumulated in float32, and an optimizer keeps a float32 copy of what rests so.
    """
    rest, stored = elements if rest is None else rest, master or dtype
    values = rest * element_bytes(stored)
    if rest != elements or stored != dtype:
        values += elements * element_bytes(dtype)  # made from what rests, beside it
    if not trainable:
        return ParameterMemory(values)
    gradients = (rest if divided else elements) * element_bytes(gradient_dtype(dtype))
    return ParameterMemory(values, gradients, round(rest * (optimizer + _COPY_BYTES * (stored in HALF))))


@dataclass(frozen=True, slots=True)
class Kept:
    """An activation that an operation keeps.

    slot    the input slot
    ratio   elements of the tensor that is kept per element of the slot, which may be a view of it
    """

    slot: int
    ratio: float


def read_back(graph: Graph, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Return the parameters that the backward of some operation reads."""
    found: set[str] = set()
    for op in graph.operations:
        grads = [records(graph, op) and graph.tensors[name].needs_grad for name in op.inputs]
        found.update(op.inputs[slot] for slot in kept_slots(op.operator, signatures[op.name].linear, grads))
    return frozenset(name for name in found if graph.tensors[name].role == "parameter")


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
