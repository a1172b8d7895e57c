"""Apply a plan: every operation gets its stages, and a choice on every axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, prod

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import Sharded, State
from nnscaler.ir.mesh import MICRO, Axis, DeviceMesh
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice, PartitionedGraph, Placement, RunInvariant, RunPartial, RunReplicated, Split, Stage
from nnscaler.transform.follow import FollowAxis, follow
from nnscaler.transform.hoist import hoist
from nnscaler.transform.order import reorder
from nnscaler.transform.plan import AssignStep, OrderStep, Plan, RecomputeStep, ReplicateStep, SplitStep
from nnscaler.transform.rules import explain_illegal_choice, explain_illegal_choices
from nnscaler.transform.select import select
from nnscaler.transform.signature import Signature


def apply_plan(graph: Graph, signatures: dict[str, Signature], plan: Plan) -> PartitionedGraph:
    """The partitioned graph that the plan describes. `signatures` gains operations that the plan repeats.

    Raises NnscalerError("plan_illegal") for a step that the annotations forbid, saying what would be legal.
    """
    _check_axes(plan)
    graph = reorder(graph, [s for s in plan.steps if isinstance(s, OrderStep)])
    stages = make_stages(plan)
    stage_of = _assign(graph, plan)
    choices, axes = follow_batch(graph, signatures, plan)
    for name, parts in plan.axes:
        if name not in plan.data_axes:
            explicit = _explicit(graph, signatures, plan, name, parts)
            made = follow(graph, signatures, FollowAxis(name, parts), {}, explicit, choices, axes)
            choices = {op: (*before, made[op]) for op, before in choices.items()}
            axes.append((name, parts))
    _check_jointly(graph, signatures, choices, axes)
    made_on = [n for n, _ in axes]
    position = [made_on.index(n) for n in (*(n for n, _ in plan.axes), MICRO)]
    recompute = {
        op.name: f"recompute_{i}"
        for i, step in enumerate(plan.steps)
        if isinstance(step, RecomputeStep)
        for op in select(graph, step.operations)
    }
    placements = {
        op.name: Placement(stage_of[op.name], tuple(choices[op.name][i] for i in position), False, recompute.get(op.name))
        for op in graph.operations
    }
    return hoist(PartitionedGraph(graph, stages, placements, plan.micro_batches), signatures)


def follow_batch(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan
) -> tuple[dict[str, tuple[Choice, ...]], list[tuple[str, int]]]:
    """The choices on the axes that the batch takes (data axes, then micro-batches), and these axes."""
    choices: dict[str, tuple[Choice, ...]] = {op.name: () for op in graph.operations}
    axes: list[tuple[str, int]] = []
    outer = 1
    for name, parts in (*((n, p) for n, p in plan.axes if n in plan.data_axes), (MICRO, plan.micro_batches)):
        explicit = _explicit(graph, signatures, plan, name, parts)
        inputs = batch_states(graph, name, parts, outer) if parts > 1 else {}
        made = follow(graph, signatures, FollowAxis(name, parts, name == MICRO), inputs, explicit, choices, axes)
        choices = {op: (*before, made[op]) for op, before in choices.items()}
        axes.append((name, parts))
        outer *= parts
    return choices, axes


def make_stages(plan: Plan) -> tuple[Stage, ...]:
    """The pipeline's stages: device d holds ranks d*n .. d*n + n - 1, stage s runs on device s modulo the devices."""
    axes = tuple(Axis(name, size) for name, size in plan.axes)
    count = prod(a.size for a in axes)
    return tuple(
        Stage(s, DeviceMesh(axes, tuple(range(d * count, (d + 1) * count))), d, plan.micro_batches)
        for s in range(plan.stages)
        for d in (s % plan.devices,)
    )


def batch_states(graph: Graph, axis: str, parts: int, outer: int) -> dict[str, State]:
    """The inputs that carry the batch, sharded along dim 0. The batch is dim 0 of the first input that has dims.

    Raises NnscalerError("plan_illegal") where the batch does not divide.
    """
    inputs = [t for t in graph.with_role("input") if t.shape]
    if not inputs:
        return {}
    batch = inputs[0].shape[0]
    if batch % (outer * parts):
        what = "micro-batches" if axis == MICRO else axis
        legal = [n for n in range(1, batch // outer + 1) if batch % (outer * n) == 0] if batch % outer == 0 else []
        raise NnscalerError(
            "plan_illegal",
            f"the batch of {batch} (input {inputs[0].name}) does not divide by {what}={parts}"
            + (f" after {outer} data-parallel parts" if outer > 1 else ""),
            help=f"legal: {what} in {legal}; or change sample_inputs()",
        )
    return {t.name: Sharded(0, outer) for t in inputs if t.shape[0] == batch}


def largest_micro_batches(graph: Graph, wanted: int, data_parts: int) -> int:
    """The largest number of micro-batches up to `wanted` that divides each rank's batch."""
    inputs = [t for t in graph.with_role("input") if t.shape]
    local = inputs[0].shape[0] // data_parts if inputs else 1
    return max((m for m in range(1, wanted + 1) if local % m == 0), default=gcd(wanted, max(local, 1)))


def _check_axes(plan: Plan) -> None:
    known = [n for n, _ in plan.mesh]
    for step in plan.steps:
        if isinstance(step, SplitStep | ReplicateStep) and step.axis not in (*known, MICRO):
            raise NnscalerError("plan_illegal", f"a {step.kind} step names axis {step.axis!r}", help=f"axes of this plan: {known}")


def _explicit(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, axis: str, parts: int
) -> dict[str, Choice]:
    found: dict[str, Choice] = {}
    if parts == 1:
        return {op.name: RunInvariant() for op in graph.operations}
    for step in plan.steps:
        if isinstance(step, SplitStep | ReplicateStep) and step.axis == axis:
            for op in select(graph, step.operations):
                found[op.name] = _choice(step, op, signatures[op.name], parts)
    return found


def _choice(step: SplitStep | ReplicateStep, op: Operation, signature: Signature, parts: int) -> Choice:
    choice: Choice
    if isinstance(step, SplitStep):
        choice = Split(step.identifier, step.outer, step.sections)
    elif step.partial:
        choice = RunPartial(frozenset(step.partial))
    else:
        choice = RunReplicated() if step.deferred else RunInvariant()
    reason = explain_illegal_choice(signature, choice, parts)
    if reason:
        raise illegal(op, signature, f"{step.kind} of {op.name} over {step.axis}={parts}: {reason}", parts)
    return choice


def illegal(op: Operation, signature: Signature, message: str, parts: int) -> NnscalerError:
    """The error for a step that an operation's annotation forbids."""
    if signature.bound is None:
        return NnscalerError(
            "plan_illegal", message, where=op.where, help=f"register {op.operator} with nnscaler.register_op(annotation)"
        )
    legal = [i for i in signature.identifiers if explain_illegal_choice(signature, Split(i), parts) is None]
    return NnscalerError(
        "plan_illegal",
        f"{message} ({op.operator} is annotated `{signature.bound.text}`)",
        where=op.where,
        help=f"identifiers that {parts} parts may split: {', '.join(legal) or 'none'}; or replicate it",
    )


def _assign(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """operation -> stages. What no step assigns runs where its latest input is made."""
    assigned: dict[str, tuple[int, ...]] = {}
    for step in plan.steps:
        if isinstance(step, AssignStep):
            if any(not 0 <= s < plan.stages for s in step.stages):
                raise NnscalerError(
                    "plan_illegal", f"stages {list(step.stages)} are assigned", help=f"this plan has stages 0..{plan.stages - 1}"
                )
            assigned.update((op.name, step.stages) for op in select(graph, step.operations))
    made: dict[str, tuple[int, ...]] = {}
    for op in graph.operations:
        sources = [made[n] for n in op.inputs if n in made]
        stages = assigned.get(op.name) or (max((s[0] for s in sources), default=0),)
        for name in op.inputs:
            here = made.get(name)
            if here is not None and any(min(here) > s for s in stages):
                raise NnscalerError(
                    "plan_illegal",
                    f"{op.name} is assigned to stage {min(stages)}, and its input {name} is made on stage {min(here)}",
                    where=op.where,
                    help="a pipeline's values go to the same or a later stage",
                )
        assigned[op.name] = stages
        made.update((n, stages) for n in op.outputs if n is not None)
    return assigned


def _check_jointly(
    graph: Graph,
    signatures: Mapping[str, Signature],
    choices: Mapping[str, tuple[Choice, ...]],
    axes: Iterable[tuple[str, int]],
) -> None:
    axes = tuple(axes)
    for op in graph.operations:
        reason = explain_illegal_choices(graph, op, signatures[op.name], choices[op.name], axes)
        if reason:
            raise illegal(op, signatures[op.name], f"choices of {op.name} do not go together: {reason}", axes[0][1])

