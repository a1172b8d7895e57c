"""Where gradients flow in straight-line code, and which values they need.

One rule, for what the compiler writes and for a text that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, Operation

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
