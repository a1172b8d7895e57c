"""Where gradients flow in straight-line code: one rule, for what the compiler writes and for a text that is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
