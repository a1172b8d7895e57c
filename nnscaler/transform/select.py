"""Select operations by name, module path, parameter or operator, each of which may be a glob."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation


def matches(op: Operation, pattern: str) -> bool:
    """Return whether a pattern names the operation, its module, or a module that contains it."""
    return any(
        fnmatchcase(text, p) for text, p in ((op.name, pattern), (op.module, pattern), (op.module, pattern + ".*"))
    )


def reads(op: Operation, graph: Graph, pattern: str) -> bool:
    """Return whether a pattern names a parameter that the operation reads."""
    parameters = (graph.tensors[name] for name in op.inputs if graph.tensors[name].role == "parameter")
    return any(fnmatchcase(fqn, pattern) for tensor in parameters for fqn in tensor.fqns)


def select(graph: Graph, patterns: Iterable[str]) -> tuple[Operation, ...]:
    """Return the operations that any of the patterns names, in graph order.

    A pattern that names no operation and no module may name parameters: `head*` is the head's operations, not the
    embedding that is tied to `head.weight`. One that names none of these may name operators: `aten.linear.default`,
    `aten.dropout*`.

    Raises NnscalerError("plan_illegal") for a pattern that names nothing.
    """
    chosen: dict[str, Operation] = {}
    for pattern in patterns:
        if pattern in graph.by_name:
            chosen[pattern] = graph.by_name[pattern]
            continue
        found = [op for op in graph.operations if matches(op, pattern)]
        found = found or [op for op in graph.operations if reads(op, graph, pattern)]
        found = found or [op for op in graph.operations if fnmatchcase(op.operator, pattern)]
        if not found:
            raise _nothing(graph, pattern)
        chosen.update((op.name, op) for op in found)
    return tuple(op for op in graph.operations if op.name in chosen)


def _nothing(graph: Graph, pattern: str) -> NnscalerError:
    modules = sorted({op.module for op in graph.operations if op.module})
    names = [op.name for op in graph.operations]
    close = get_close_matches(pattern.rstrip(".*"), [*modules, *names], n=4, cutoff=0.4) or modules[:6]
    return NnscalerError(
        "plan_illegal",
        f"pattern {pattern!r} matches no module and no operation",
        help=f"modules of this model: {', '.join(close)}",
    )
