"""Find which values of straight-line code have gradients, and which values are kept for backward.

One rule, for what the compiler writes and for a text that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature

Line = tuple[Collection[str], Collection[str]]  # names that it makes, names that it reads


def records(graph: Graph, op: Operation) -> bool:
    """Return whether the operation records a gradient."""
    return op.region.grad_enabled and any(graph.tensors[n].needs_grad for n in op.outputs if n is not None)


def differentiated(lines: Sequence[Line], roots: Iterable[str]) -> frozenset[str]:
    """Return the names that get a gradient: the roots, and those from which a root is reached.

    lines   in the order in which they run; only those that record gradients, and of their names only those of tensors
            that need one
    roots   names at which gradients start: the loss, and what is sent to a reader that has a gradient for it
    """
    live = set(roots)
    for made, read in reversed(lines):
        if not live.isdisjoint(made):
            live.update(read)
    return frozenset(live)


def kept_slots(operator: str, linear: Collection[Collection[int]], needs_grad: Sequence[bool]) -> tuple[int, ...]:
    """Return the inputs whose values backward reads.

    These are the inputs in which, together with an input that has a gradient, the operator is not linear. `linear`: the
    operator's linear sets; `needs_grad`: of each input. An output that an operator keeps instead is of the same size.
    """
    if facts_of(operator).keeps_nothing:
        return ()
    return tuple(
        i
        for i in range(len(needs_grad))
        if any(wants and not any(i in s and j in s for s in linear) for j, wants in enumerate(needs_grad))
    )


def kept_by(graph: Graph, op: Operation, signature: Signature) -> tuple[int, ...]:
    """Return the inputs of an operation whose values backward reads; none of one that records no gradient."""
    grads = [graph.tensors[name].needs_grad for name in op.inputs]
    return kept_slots(op.operator, signature.linear, grads) if records(graph, op) else ()


def reads_alone(kept: Collection[int], linear: Collection[Collection[int]], inputs: int) -> bool:
    """Return whether an operation is linear in each of its inputs, so that its backward reads those alone.

    kept    the inputs that backward reads
    linear  the operator's linear sets
    """
    return bool(kept) and {slot for slots in linear for slot in slots}.issuperset(range(inputs))


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """An activation, or an input of the model, that an operation keeps.

    slot    the input slot
    tensor  the name of what is kept, of which the input may be a view
    """

    slot: int
    tensor: str


def viewed(graph: Graph) -> dict[str, str]:
    """Return, by tensor that is a view, the tensor whose elements it shows."""
    base: dict[str, str] = {}
    for op in graph.operations:
        if facts_of(op.operator).view:
            shown = base.get(op.inputs[0], op.inputs[0])
            base.update((name, shown) for name in op.outputs if name is not None)
    return base


def first_kept(graph: Graph, signatures: Mapping[str, Signature]) -> dict[str, tuple[KeptTensor, ...]]:
    """Return, by operation, what is kept for it and for no earlier one.

    Several readers of one tensor keep it once.
    """
    base, seen = viewed(graph), set[str]()
    found: dict[str, tuple[KeptTensor, ...]] = {}
    for op in graph.operations:
        kept = []
        for slot in kept_by(graph, op, signatures[op.name]):
            whole = base.get(op.inputs[slot], op.inputs[slot])
            if graph.tensors[whole].role in ("activation", "input") and whole not in seen:
                seen.add(whole)
                kept.append(KeptTensor(slot, whole))
        found[op.name] = tuple(kept)
    return found
