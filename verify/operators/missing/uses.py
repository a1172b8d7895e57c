"""The operators of a graph that have no annotation: where they are called, and whether it matters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from op_registry.registry import Registry, default_registry

from nnscaler.ir.graph import Graph, Operation
from nnscaler.tracing import Traced
from nnscaler.tracing.export.autograd_functions import OpaqueFunction

Kind = Literal["aten", "library", "function"]


@dataclass(frozen=True)
class Missing:
    """An operator without annotation.

    operators  its names in the graph: one, or one for each way in which an `autograd.Function` is called
    kind       an operator of torch, of somebody's torch.library, or an unregistered `autograd.Function`
    calls      the operations that call it, in order
    depends    a parameter reaches one of its calls: only then does a plan lose by it
    function   the class, of a "function"
    """

    operators: tuple[str, ...]
    kind: Kind
    calls: tuple[Operation, ...]
    depends: bool
    function: OpaqueFunction | None = None

    @property
    def operator(self) -> str:
        return self.operators[0]

    @property
    def name(self) -> str:
        """As a user knows it: the class of a function, the operator's name otherwise."""
        return self.operator if self.function is None else self.function.function.__name__


@dataclass(frozen=True)
class CallSite:
    """Calls from one line of one class of module: `modules` are the paths of those that ran it."""

    where: str
    module_type: str
    modules: tuple[str, ...]
    calls: int

    def __str__(self) -> str:
        """`model.py:31 in blocks.0.mlp (Mlp) and 7 more`."""
        inside = f" in {self.modules[0]}" if self.modules[0] else ""
        kind = f" ({self.module_type})" if self.module_type else ""
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.where}{inside}{kind}{more}"


def find_missing(traced: Traced, registry: Registry | None = None) -> tuple[Missing, ...]:
    """Return every operator that the graph calls and the registry does not know: those that a parameter reaches first,
    then by number of calls."""
    registry = registry or default_registry()
    calls: dict[object, list[Operation]] = {}
    for operation in traced.graph.operations:
        if registry.lookup(operation.operator) is None:
            opaque = traced.functions.get(operation.operator)
            calls.setdefault(operation.operator if opaque is None else opaque.function, []).append(operation)
    reached = reached_by_parameters(traced.graph) if calls else frozenset()
    found = [_missing(traced, operations, reached) for operations in calls.values()]
    return tuple(sorted(found, key=lambda m: (not m.depends, -len(m.calls), m.operator)))


def reached_by_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the operations whose inputs depend on a parameter.

    The others compute the same on every rank, from what every rank has.
    """
    tensors = {t.name for t in graph.with_role("parameter")}
    operations: set[str] = set()
    for operation in graph.operations:
        if tensors.intersection(operation.inputs):
            operations.add(operation.name)
            tensors.update(name for name in operation.outputs if name is not None)
    return frozenset(operations)


def places(calls: Iterable[Operation]) -> tuple[CallSite, ...]:
    """Return the calls by line and class of module, in order."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for operation in calls:
        grouped.setdefault((_where(operation), operation.module_type), []).append(operation.module)
    return tuple(
        CallSite(where, kind, tuple(dict.fromkeys(modules)), len(modules)) for (where, kind), modules in grouped.items()
    )


def _where(operation: Operation) -> str:
    if operation.where is None:
        return "?"
    return f"{shown(operation.where.file)}:{operation.where.line}"


def shown(file: str) -> str:
    """Return the path, relative to the current folder where it is inside; an installed one from its package on."""
    path = Path(file)
    here = Path.cwd()
    if "site-packages" in path.parts:
        return str(Path(*path.parts[path.parts.index("site-packages") + 1 :]))
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _missing(traced: Traced, calls: Sequence[Operation], reached: Collection[str]) -> Missing:
    operators = tuple(dict.fromkeys(op.operator for op in calls))
    function = traced.functions.get(operators[0])
    kind: Kind = "function" if function else "aten" if operators[0].startswith("aten.") else "library"
    return Missing(operators, kind, tuple(calls), any(op.name in reached for op in calls), function)
