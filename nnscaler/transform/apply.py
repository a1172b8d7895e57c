"""Apply a plan: every operation gets its stages, and a choice on every axis of their meshes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import prod

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices
from nnscaler.ir.graph import Graph, is_free_name
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, PartitionedGraph, Placement, Stage
from nnscaler.layout import IN_STEP, MICRO, SLICE, Axis, DeviceMesh
from nnscaler.transform.chunked_regions import ChunkedRegion, check_chunks, choose_pieces, regions_of
from nnscaler.transform.complete_plan import choose, illegal
from nnscaler.transform.hoist_whole_batch_values import hoist
from nnscaler.transform.plan import (
    SHARED,
    AssignStep,
    Axes,
    OrderStep,
    Plan,
    RecomputeStep,
    ReplicateStep,
    RestStep,
    SplitStep,
    describe_axes,
)
from nnscaler.transform.select_operations import select
from nnscaler.transform.zero_sharded_parameters import resting

# The order transform: within what dependencies allow, run some operations before others.


def reorder(graph: Graph, steps: Sequence[OrderStep]) -> Graph:
    """Reorder the graph's operations so that they respect the steps; otherwise they stay as before.

    Raises NnscalerError("plan_illegal") where the steps contradict the dependencies (or each other).
    """
    if not steps:
        return graph
    position = {op.name: i for i, op in enumerate(graph.operations)}
    after: dict[str, set[str]] = {op.name: set() for op in graph.operations}
    for op in graph.operations:
        for name in op.inputs:
            producer = graph.producers.get(name)
            if producer is not None:
                after[op.name].add(producer.name)
    for step in steps:
        first = [op.name for op in select(graph, step.first)]
        for later in select(graph, step.second):
            after[later.name].update(name for name in first if name != later.name)
    waiting = {name: len(before) for name, before in after.items()}
    followers: dict[str, list[str]] = {name: [] for name in after}
    for name, before in after.items():
        for earlier in before:
            followers[earlier].append(name)
    ready = [position[name] for name, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    ordered = []
    while ready:
        op = graph.operations[heapq.heappop(ready)]
        ordered.append(op)
        for name in followers[op.name]:
            waiting[name] -= 1
            if waiting[name] == 0:
                heapq.heappush(ready, position[name])
    if len(ordered) < len(graph.operations):
        stuck = next(op for op in graph.operations if waiting[op.name] > 0)
        raise NnscalerError(
            "plan_illegal",
            f"the order steps contradict the dependencies of {stuck.name}",
            where=stuck.where,
            help="an operation cannot run before the operations whose results it reads",
        )
    return graph.replace(operations=tuple(ordered))


def apply_plan(graph: Graph, signatures: dict[str, Signature], plan: Plan) -> PartitionedGraph:
    """Partition the graph by a plan. `signatures` gains operations that the plan repeats.

    Raises NnscalerError("plan_illegal") for a step that the annotations forbid, saying what would be legal.
    """
    _check(plan)
    check_chunks(plan)
    graph = reorder(graph, [s for s in plan.steps if isinstance(s, OrderStep)])
    stages, devices = make_stages(plan), plan.device_ranks
    stage_of = _assign(graph, plan)
    _check_axes(graph, plan, stage_of)
    graph, regions = regions_of(graph, plan, stage_of)
    of_mesh: dict[Axes, Mapping[str, tuple[Choice, ...]]] = {}
    mesh_axes = plan.mesh_axes
    for mesh in mesh_axes:
        if mesh not in of_mesh:
            having = {stage for stage, axes in enumerate(mesh_axes) if axes == mesh}
            here = {n for n, where in stage_of.items() if not having.isdisjoint(where)}
            of_mesh[mesh] = _choose(graph, signatures, plan, mesh, here, regions)
    recompute = {
        op.name: f"recompute_{i}"
        for i, step in enumerate(s for s in plan.steps if isinstance(s, RecomputeStep))
        for op in select(graph, step.operations)
    }
    chunks = {op.name: region.chunk for region in regions for op in region.operations}
    placements = {
        op.name: Placement(
            stage_of[op.name],
            tuple(of_mesh[mesh][op.name] for mesh in mesh_axes),
            False,
            None if op.name in chunks else recompute.get(op.name),
            chunks.get(op.name),
        )
        for op in graph.operations
    }
    made = PartitionedGraph(graph, stages, placements, devices, plan.micro_batches, resting(graph, plan))
    return hoist(made, signatures)


def _choose(
    graph: Graph,
    signatures: Mapping[str, Signature],
    plan: Plan,
    mesh: Axes,
    here: set[str],
    regions: Sequence[ChunkedRegion],
) -> Mapping[str, tuple[Choice, ...]]:
    """Choose on the axes of a mesh, on those of regions, then on slices and micro-batches."""
    choices, axes = choose(graph, signatures, plan, mesh, here)
    of_mesh = [region for region in regions if any(op.name in here for op in region.operations)]
    for axis in plan.chunk_axes:
        pieces = choose_pieces(graph, signatures, axis, of_mesh, choices, axes)
        choices = {op: (*made, pieces[op]) for op, made in choices.items()}
        axes = (*axes, axis)
    every = tuple(axes)
    for op in graph.operations:
        reason = explain_illegal_choices(graph, op, signatures[op.name], choices[op.name], every)
        if reason:
            raise illegal(op, signatures[op.name], f"choices of {op.name} do not go together: {reason}", axes[0][1])
    made_on = [name for name, _ in axes]
    in_step = IN_STEP if plan.slices else (MICRO,)
    position = [made_on.index(name) for name in (*(name for name, _ in (*mesh, *plan.chunk_axes)), *in_step)]
    return {name: tuple(made[i] for i in position) for name, made in choices.items()}


def make_stages(plan: Plan) -> tuple[Stage, ...]:
    """Make the pipeline's stages. On the axis along which its devices lie, the first device of a stage comes first."""
    pieces = tuple(Axis(*axis) for axis in plan.chunk_axes)
    ranks = plan.device_ranks
    stages = []
    for index, (devices, axes) in enumerate(zip(plan.places, plan.mesh_axes, strict=True)):
        before = takewhile(lambda axis: axis[0] != SHARED, axes)
        parts = prod(size for _, size in before)  # of each device's ranks, between which those of the others lie
        each = len(ranks[devices[0]]) // parts
        every = (ranks[device][part * each : (part + 1) * each] for part in range(parts) for device in devices)
        mesh = DeviceMesh(tuple(Axis(*axis) for axis in axes), tuple(rank for own in every for rank in own))
        stages.append(Stage(index, mesh, devices, plan.micro_batches, pieces, len(plan.slices) or 1))
    return tuple(stages)


def _check(plan: Plan) -> None:
    """Check the meshes. Raises NnscalerError("plan_illegal") for meshes that make no sense."""
    if plan.stage_axes and (len(plan.stage_axes) != plan.devices or any(n != "pp" for n, _ in plan.mesh)):
        raise NnscalerError(
            "plan_illegal",
            f"the plan has stage_axes for {len(plan.stage_axes)} devices, and the mesh {dict(plan.mesh)}",
            help=f"with stage_axes, the mesh is pp={len(plan.stage_axes)} alone",
        )
    if plan.stage_devices:
        check_places(plan)
    if plan.slices:
        _check_slices(plan)
    names = {name for axes in plan.device_axes for name, _ in axes}
    if not all(is_free_name(name) and name != "pp" for name in names) or plan.micro_batches < 1 or plan.chunks < 1:
        raise NnscalerError(
            "plan_illegal",
            f"the plan has the axes {sorted(names)}, {plan.micro_batches} micro-batches and {plan.chunks} chunks",
            help="axes inside a stage are words, other than pp, micro and the like; there is at least one micro-batch "
            "and one chunk",
        )


def _check_slices(plan: Plan) -> None:
    """Check the slices of a plan. Raises NnscalerError("plan_illegal")."""
    if len(plan.slices) < 2 or min(plan.slices) < 1:
        message = f"the plan has slices {list(plan.slices)}"
        raise NnscalerError("plan_illegal", message, help="two or more shares of the tokens, such as [1, 1] or [3, 2]")
    if len(set(plan.device_axes)) > 1:
        message = "the plan has slices, and stage_axes that differ: a slice goes from a rank to the one at its place"
        raise NnscalerError("plan_illegal", message, help="give all stages the axes of the mesh, or leave slices away")
    shared = next((stage for stage, devices in enumerate(plan.places) if len(devices) > 1), None)
    if shared is not None:
        message = f"the plan has slices, and stage {shared} on the devices {list(plan.places[shared])}"
        raise NnscalerError("plan_illegal", message, help="give each stage one device, or leave slices away")
    if plan.chunk_axes:
        message = f"the plan has slices, and regions that run in pieces of {plan.chunk_axes[0][0]}"
        raise NnscalerError("plan_illegal", message, help="leave the chunk steps away, or the slices")
    taken = {name for axes in (plan.mesh, *plan.stage_axes) for name, _ in axes}
    if SLICE in taken:
        message = f"the plan has slices, and an axis of its own that is named {SLICE!r}"
        raise NnscalerError("plan_illegal", message, help="give the axis another name")


def check_places(plan: Plan) -> None:
    """Check `stage_devices`: the devices exist, those of one stage are alike, each of them has a stage, and `chunks`
    says nothing besides. Raises NnscalerError("plan_illegal")."""
    help = f"the devices of this plan (pp={plan.devices}) are 0..{plan.devices - 1}, and each has at least one stage"
    for stage, devices in enumerate(plan.stage_devices):
        if not devices or len(set(devices)) < len(devices) or not set(devices) <= set(range(plan.devices)):
            message = f"stage_devices: stage {stage} is on the devices {list(devices)}"
            raise NnscalerError("plan_illegal", message, help=help)
        axes = {device: plan.device_axes[device] for device in devices}
        if len(set(axes.values())) > 1:
            unlike = ", ".join(f"{device}: {describe_axes(found)}" for device, found in axes.items())
            message = f"stage_devices: stage {stage} is on devices with unlike axes: {unlike}"
            raise NnscalerError("plan_illegal", message, help="a stage is on one device, or on several that are alike")
    idle = sorted(set(range(plan.devices)).difference(*plan.stage_devices))
    if idle:
        raise NnscalerError("plan_illegal", f"stage_devices: device {idle[0]} has no stage", help=help)
    if plan.chunks != 1:
        message = f"the plan has chunks {plan.chunks}, and stage_devices for {plan.stages} stages"
        raise NnscalerError("plan_illegal", message, help="stage_devices say how many stages there are: chunks is 1")


def _check_axes(graph: Graph, plan: Plan, stage_of: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every step is about an axis that some of its operations have."""
    mesh_axes = plan.mesh_axes
    every = (axis for axes in (plan.mesh, *plan.stage_axes, *mesh_axes) for axis in axes)
    known = dict.fromkeys(name for name, _ in every if name != "pp")
    for step in plan.steps:
        if not isinstance(step, SplitStep | ReplicateStep | RestStep):
            continue
        if step.axis == MICRO and not isinstance(step, RestStep):
            continue
        if step.axis not in known:
            message = f"a {step.kind} step names axis {step.axis!r}"
            raise NnscalerError("plan_illegal", message, help=f"axes of this plan: {list(known)}")
        if plan.stage_axes and not isinstance(step, RestStep):
            found = select(graph, step.operations)
            having = [d for d, axes in enumerate(plan.stage_axes) if step.axis in dict(axes)]
            if not any(step.axis in dict(mesh_axes[s]) for op in found for s in stage_of[op.name]):
                raise NnscalerError(
                    "plan_illegal",
                    f"a {step.kind} step names axis {step.axis!r}, which no stage of its operations has",
                    where=found[0].where,
                    help=f"pipeline devices with this axis: {having}",
                )


def _assign(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """operation -> stages. What no step assigns runs where its latest input is made."""
    assigned: dict[str, tuple[int, ...]] = {}
    for step in plan.steps:
        if isinstance(step, AssignStep):
            if any(not 0 <= s < plan.stages for s in step.stages):
                raise NnscalerError(
                    "plan_illegal",
                    f"stages {list(step.stages)} are assigned",
                    help=f"this plan has stages 0..{plan.stages - 1}",
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
