"""Operations by name, module path or glob."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation


def matches(op: Operation, graph: Graph, pattern: str) -> bool:
    """Whether a pattern names the operation, its module (or a module that contains it), or its parameter."""
    if fnmatchcase(op.name, pattern) or fnmatchcase(op.module, pattern) or fnmatchcase(op.module, pattern + ".*"):
        return True
    fqns = (fqn for name in op.inputs for fqn in graph.tensors[name].fqns if graph.tensors[name].role == "parameter")
    return any(fnmatchcase(fqn, pattern) for fqn in fqns)


def select(graph: Graph, patterns: Iterable[str]) -> tuple[Operation, ...]:
    """The operations that any of the patterns names, in graph order.

    Raises NnscalerError("plan_illegal") for a pattern that names nothing.
    """
    chosen: dict[str, Operation] = {}
    for pattern in patterns:
        if pattern in graph.by_name:
            chosen[pattern] = graph.by_name[pattern]
            continue
        found = [op for op in graph.operations if matches(op, graph, pattern)]
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
