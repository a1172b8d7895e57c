"""Activations that operations keep, and conversions that a recomputed group repeats in backward."""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.bind_call import linear_sets
from op_registry.registry import default_registry

from nnscaler.communication.communicated_graph import Compute, Convert, Statement, Version
from nnscaler.ir.graph import Graph
from nnscaler.transform.saved_tensors import kept_slots


def kept_inputs(graph: Graph, statement: Compute) -> tuple[Version, ...]:
    """Return the inputs whose values backward reads."""
    recorded = statement.operation.region.grad_enabled and any(
        v is not None and graph.tensors[v.tensor].needs_grad for v in statement.outputs
    )
    if not recorded:
        return ()
    operator = statement.operation.operator
    spec = default_registry().lookup(operator)
    sets = linear_sets(spec, statement.call) if spec is not None else ()
    grads = [graph.tensors[v.tensor].needs_grad for v in statement.inputs]
    return tuple(statement.inputs[slot] for slot in kept_slots(operator, sets, grads))


def group_of(graph: Graph, statements: Sequence[Statement], position: int) -> str | None:
    """Return the recomputed group of a statement; None outside of any.

    A conversion belongs to a group when the operations around it do; that of a parameter, when the operation that reads
    it does, so that the gathered parameter need not be kept.
    """
    statement = statements[position]
    if isinstance(statement, Compute):
        return statement.placement.recompute
    following = next((s for s in statements[position:] if isinstance(s, Compute)), None)
    if following is not None and graph.tensors[statement.source.tensor].role == "parameter":
        return following.placement.recompute
    previous = next((s for s in reversed(statements[:position]) if isinstance(s, Compute)), None)
    around = {None if s is None else s.placement.recompute for s in (previous, following)}
    return around.pop() if len(around) == 1 else None


def repeated_in_backward(graph: Graph, statements: Sequence[Statement]) -> frozenset[int]:
    """Return the positions of conversions that run again in backward.

    A group is run again up to the last value that backward reads: the rest of it is not needed.
    """
    if not any(isinstance(s, Compute) and s.placement.recompute for s in statements):
        return frozenset()
    found: set[int] = set()
    runs: list[list[int]] = []
    groups = [group_of(graph, statements, i) for i in range(len(statements))]
    for i, group in enumerate(groups):
        if group is not None and runs and groups[i - 1] == group:
            runs[-1].append(i)
        elif group is not None:
            runs.append([i])
    for run in runs:
        keeping = [i for i in run if isinstance(s := statements[i], Compute) and kept_inputs(graph, s)]
        last = max(keeping, default=-1)
        found.update(i for i in run if i < last and isinstance(statements[i], Convert))
    return frozenset(found)
