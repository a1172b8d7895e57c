"""Recomputation that the model itself asks for (`torch.utils.checkpoint`), as steps of a plan."""

from __future__ import annotations

from dataclasses import replace

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.transform.plan import Plan, RecomputeStep
from nnscaler.transform.select import matches


def with_checkpoints(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with a `recompute` step for each call of `torch.utils.checkpoint` in the model.

    A plan that has `recompute` steps of its own stays as it is.
    """
    if any(isinstance(step, RecomputeStep) for step in plan.steps):
        return plan
    return replace(plan, steps=(*plan.steps, *checkpoint_steps(graph)))


def checkpoint_steps(graph: Graph) -> tuple[RecomputeStep, ...]:
    """Return one step per checkpointed call, in order: the module where it is one, otherwise its operations."""
    calls: dict[str, list[Operation]] = {}
    for operation in graph.operations:
        if operation.region.recompute is not None:
            calls.setdefault(operation.region.recompute, []).append(operation)
    return tuple(RecomputeStep(_patterns(graph, called)) for called in calls.values())


def _patterns(graph: Graph, called: list[Operation]) -> tuple[str, ...]:
    names = tuple(op.name for op in called)
    paths = [op.module.split(".") for op in called]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    module = ".".join(paths[0][:shared])
    inside = tuple(op.name for op in graph.operations if module and matches(op, module))
    return (module,) if inside == names else names
