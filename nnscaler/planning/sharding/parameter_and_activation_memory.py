"""Memory of parameters, with their gradients and optimizer states, and of activations kept for backward: for every
operation, the inputs that it is the first to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.errors import NnscalerError
from nnscaler.ir.gradients_and_kept_values import KeptTensor, first_kept, kept_by
from nnscaler.ir.graph import HALF, Graph, Operation, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.transform.cheap_outputs import CheapOutputs, cheap_outputs

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
    cheap   whether it may be computed again instead
    """

    slot: int
    ratio: float
    cheap: bool = False


def read_back(graph: Graph, signatures: Mapping[str, Signature]) -> frozenset[str]:
    """Return the parameters that the backward of some operation reads."""
    found = {op.inputs[slot] for op in graph.operations for slot in kept_by(graph, op, signatures[op.name])}
    return frozenset(name for name in found if graph.tensors[name].role == "parameter")


@dataclass(frozen=True)
class KeptActivations:
    """
    by_operation  the slots that are kept for an operation and for no earlier one
    cheap         operations that may run again, so that what is `cheap` need not be kept
    """

    by_operation: Mapping[str, tuple[Kept, ...]]
    cheap: tuple[CheapOutputs, ...]

    @classmethod
    def of(cls, graph: Graph, signatures: Mapping[str, Signature], again: bool = False) -> KeptActivations:
        """Return what is kept for backward. `again`: whether cheap outputs may be computed again."""
        first = first_kept(graph, signatures)
        cheap = cheap_outputs(graph, signatures, first) if again else ()
        made = {name for one in cheap for op in one.again for name in graph.by_name[op].outputs}

        def kept(op: Operation, own: KeptTensor) -> Kept:
            whole, read = graph.tensors[own.tensor].elements, graph.tensors[op.inputs[own.slot]].elements
            return Kept(own.slot, whole / max(read, 1), own.tensor in made)

        return cls({op.name: tuple(kept(op, one) for one in first[op.name]) for op in graph.operations}, cheap)
