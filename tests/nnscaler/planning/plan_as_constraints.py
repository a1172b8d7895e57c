"""Turn a plan into constraints on everything that the planner chooses."""

from __future__ import annotations

from collections.abc import Mapping

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint, all_of, sizes
from nnscaler.scheduling.registry import planned_schedules
from nnscaler.transform.complete_plan import choose
from nnscaler.transform.plan import DP, PP, TP, AssignStep, OrderStep, Plan, RecomputeStep, RestStep
from nnscaler.transform.select_operations import layers_of, select


def constraints_of(plan: Plan, graph: Graph, signatures: Mapping[str, Signature]) -> Constraint:
    """Constrain a search to a plan's sizes, its choice of every operation on tp, and its pipeline device of every
    operation with a gradient.

    Raises NnscalerError("plan_illegal") for a plan that is outside of what the planner searches: docs/planner.md.
    """
    outside = _outside(plan, graph)
    if outside is not None:
        raise NnscalerError(
            "plan_illegal",
            f"the planner does not search plans with {outside}",
            help="constrain what it does search: sizes, and choices on tp",
        )
    wanted = dict(plan.mesh)
    again = any(isinstance(step, RecomputeStep) for step in plan.steps)
    zero = next((step.zero for step in reversed(plan.steps) if isinstance(step, RestStep)), 0)
    sized = sizes(
        plan.schedule if plan.devices > 1 else None,
        dp=wanted.get(DP, 1),
        tp=wanted.get(TP, 1),
        pp=wanted.get(PP, 1),
        ep=1,
        micro_batches=plan.micro_batches,
        recompute=again,
        zero=zero,
    )
    stages = [step for step in plan.steps if isinstance(step, AssignStep)]
    placed = {op.name: step.stages for step in stages for op in select(graph, step.operations)}
    trained = [
        op for op in graph.operations if any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n)
    ]
    at = tuple((op.name, placed[op.name][0]) for op in trained if op.name in placed)
    devices = Constraint("the stages of a plan", at=at)
    if wanted.get(TP, 1) == 1:
        return all_of((sized, devices))
    made, axes = choose(graph, signatures, plan, plan.device_axes[0], frozenset(graph.by_name))
    axis = [name for name, _ in axes].index(TP)
    chosen = {name: choices[axis] for name, choices in made.items()}

    def allows(op: Operation, choice: Choice) -> bool:
        return choice == chosen[op.name]

    return all_of((sized, devices, Constraint("the choices of a plan", allows=allows, also=chosen)))


def _outside(plan: Plan, graph: Graph) -> str | None:
    """Name a feature of the plan that the planner does not search; None where there is none."""
    unknown = [name for name, size in plan.mesh if name not in (DP, TP, PP) and size > 1]
    if unknown or plan.data_axes != (DP,):
        return f"the axes {', '.join(name for name, _ in plan.mesh)}, of which {plan.data_axes} have the batch"
    if plan.stage_axes:
        return "stages of unlike meshes"
    if plan.orders or plan.stage_devices:
        return f"the schedule {plan.schedule}, with orders or places of stages of its own"
    if plan.chunks > 1 or plan.schedule.lower() not in [kind.name for kind in planned_schedules()]:
        return f"the schedule {plan.schedule} and {plan.chunks} stages per device"
    if any(isinstance(step, OrderStep) for step in plan.steps):
        return "an order of operations"
    if any(isinstance(step, RestStep) and (step.axis != DP or "*" not in step.parameters) for step in plan.steps):
        return "some parameters at rest in shards, or in those of another axis than dp"
    steps = [step for step in plan.steps if isinstance(step, RecomputeStep)]
    again = {op.name for step in steps for op in select(graph, step.operations)}
    layers = {name for layer in layers_of(graph) for name in layer.operations}
    if again and again != layers:
        return "recomputation of some layers only"
    return None
