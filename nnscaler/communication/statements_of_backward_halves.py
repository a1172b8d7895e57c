"""Divide the statements of a stage between the two halves of its backward, as `nnscaler.split_backward_graph` does.

A node is a statement, or a variable that is stored or received.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType

from op_registry.registry import default_registry

from nnscaler.communication.communicated_graph import (
    Compute,
    StageProgram,
    Version,
    again_in,
    differentiated,
    kept_inputs,
    reads,
    runs_again,
    writes,
)
from nnscaler.communication.parameter_layouts import gathered_again
from nnscaler.ir.graph import Graph
from nnscaler.split_backward_graph import halves_of

BOTH = 0.5  # an operator takes as long for the gradients of one side as for those of the other

# products of rows and a matrix -> the inputs that these are
_PRODUCTS = {
    "aten.linear.default": (0, 1),
    "aten.matmul.default": (0, 1),
    "aten.mm.default": (0, 1),
    "aten.addmm.default": (1, 2),
}


@dataclass(frozen=True, slots=True)
class StatementHalves:
    """The part of a statement's backward that W runs; I runs the rest.

    gradients  0, 1, or BOTH where it gives gradients to both sides
    again      the same of what is computed, or gathered, again: in the first half that reads a value of its group, or
               the parameter
    kept       the inputs that W reads: of a product whose rows are on the trunk, these, and not the matrix
    """

    gradients: float
    again: float
    kept: tuple[Version, ...] = ()


def statement_halves(graph: Graph, program: StageProgram) -> tuple[StatementHalves, ...]:
    """Return the halves of each statement of `forward`, in order."""
    live, statements = differentiated(graph, program), program.forward
    below: dict[Hashable, Sequence[Hashable]] = {}
    made: dict[str, int] = {}
    for i, statement in enumerate(statements):
        if not any(v.variable in live and graph.tensors[v.tensor].needs_grad for v in writes(statement)):
            continue
        found: dict[Hashable, None] = {}
        for v in reads(statement):
            if graph.tensors[v.tensor].needs_grad:
                node = made.get(v.variable, v.variable)
                below.setdefault(node, ())
                found[node] = None
        below[i] = tuple(found)
        made.update((v.variable, i) for v in writes(statement))
    received = {m.target.variable for m in program.receives if m.needs_grad}

    def at_once(node: Hashable) -> bool:
        statement = statements[node] if isinstance(node, int) else None
        return isinstance(statement, Compute) and _at_once(statement.operation.operator)

    vectors = {s.variable for s in program.stored if len(graph.tensors[s.tensor].shape) <= 1}
    halves = halves_of(below, received, at_once, vectors)
    shares: list[float] = []
    for i in range(len(statements)):
        if i in halves.trunk:
            shares.append(BOTH if any(map(halves.waits, (n for n in below[i] if n not in halves.trunk))) else 0.0)
        else:
            shares.append(1.0 if i not in below or halves.waits(i) else 0.0)
    gathered = gathered_again(graph, program)
    regions = [again_in(graph, statements, i) for i in range(len(statements))] if _recomputes(program) else []
    first = {region for i, region in enumerate(regions) if i in below and shares[i] < 1}

    def again(i: int) -> float:
        if i in gathered:
            return float(all(again(j) if regions and regions[j] else shares[j] == 1.0 for j in gathered[i]))
        return 1.0 if regions and regions[i] not in first else 0.0

    def kept(i: int) -> tuple[Version, ...]:
        statement = statements[i]
        if i not in below or not shares[i] or not isinstance(statement, Compute):
            return ()
        trunk = {v for v in statement.inputs if made.get(v.variable, v.variable) in halves.trunk}
        matrix = _matrix(graph, statement, trunk)
        return tuple(v for v in kept_inputs(graph, statement) if v != matrix)

    return tuple(StatementHalves(share if i in below else 0.0, again(i), kept(i)) for i, share in enumerate(shares))


def _matrix(graph: Graph, statement: Compute, trunk: Collection[Version]) -> Version | None:
    """Return the matrix of a product of which the rows are on the trunk, and the matrix is not."""
    if statement.operation.operator not in _PRODUCTS or statement.operation.kwargs:  # `alpha` and `beta` of addmm
        return None
    rows, matrix = (statement.inputs[slot] for slot in _PRODUCTS[statement.operation.operator])
    dims = [len(graph.tensors[version.tensor].shape) for version in (rows, matrix)]
    return matrix if rows in trunk and matrix not in trunk and dims[0] >= 2 == dims[1] else None


def _recomputes(program: StageProgram) -> bool:
    return any(isinstance(s, Compute) and runs_again(s) for s in program.forward)


@cache
def _at_once(operator: str) -> bool:
    """Return whether an operator's backward is one function: it is no operator of ours, nor a user's plain function,
    which is differentiated step by step."""
    if operator.startswith(("aten.", "nnscaler.")):
        return False
    spec = default_registry().lookup(operator)
    return spec is None or not isinstance(getattr(spec.target, "_torchdynamo_orig_callable", spec.target), FunctionType)
