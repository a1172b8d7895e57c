"""Make a plan from its axes: `dp=2,tp=2,pp=2`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from op_registry.annotation.splits import balanced

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, Split
from nnscaler.layout import Sharded
from nnscaler.planning.beam_search_axis_choices import cheapest_choices
from nnscaler.planning.constraints.interlaced import interlaced_stages, of_layers, shared_ends
from nnscaler.planning.constraints.size_and_choice_constraints import SharedEnds
from nnscaler.planning.context_and_expert_parallel import batch_axes, context_parallel, expert_steps
from nnscaler.planning.parse_axes import BALANCED, OWNED
from nnscaler.planning.stages_of_recycling_models import partition_runs, runs_of
from nnscaler.scheduling.interlaced import around
from nnscaler.scheduling.registry import DEFAULT, get_schedule, with_schedule
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.transform.complete_plan import follow_batch, largest_micro_batches
from nnscaler.transform.partition_stages import StagePartition, partition_stages, random_operators, work_of
from nnscaler.transform.plan import (
    CP,
    DP,
    EP,
    PP,
    SHARD,
    SHARED,
    TP,
    AssignStep,
    Plan,
    ReplicateStep,
    RestStep,
    SplitStep,
    Step,
    stage_devices,
)
from nnscaler.transform.propagate_choices import all_candidates, reach
from nnscaler.transform.select_operations import select

# Tensor parallelism from annotations alone: the legal choice per operation with the least work and communication.
# From the cost of compute, memory traffic, parameter memory and communicated elements, `search` finds the
# column/row pattern of an MLP and head-parallel attention by itself, through views and packed projections; nothing
# looks at parameter names.
# Splits that the dims of the inputs reach (batch, sequence) are left to other axes. Unequal shards serve where a
# size does not divide; operations that no parameter reaches are small, and not worth them.


def tensor_parallel(
    graph: Graph,
    signatures: Mapping[str, Signature],
    axis: str,
    parts: int,
    whole: Collection[str] = (),
    made: Mapping[str, tuple[Choice, ...]] | None = None,
    axes: Sequence[tuple[str, int]] = (),
) -> tuple[SplitStep | ReplicateStep, ...]:
    """Return steps for every operation on `axis`.

    Operations in `whole` are replicated. `made`: the choices on other axes, with which the new ones must be legal
    together.
    """
    options = _legal_options(graph, signatures, (axis, parts), whole, made, axes)
    return steps_of(graph, axis, cheapest_choices(graph, signatures, parts, options))


def _legal_options(
    graph: Graph,
    signatures: Mapping[str, Signature],
    axis: tuple[str, int],
    whole: Collection[str],
    made: Mapping[str, tuple[Choice, ...]] | None,
    axes: Sequence[tuple[str, int]],
) -> dict[str, tuple[Choice, ...]]:
    """Return the choices to compare that are legal together with those made on other axes."""
    candidates = _options(graph, signatures, axis[1], whole)
    every = (*axes, axis)

    def together(op: Operation, choice: Choice) -> bool:
        if made is None or isinstance(choice, RunInvariant):
            return True
        return not explain_illegal_choices(graph, op, signatures[op.name], (*made[op.name], choice), every)

    return {op.name: tuple(c for c in candidates[op.name] if together(op, c)) for op in graph.operations}


def over_all_ranks(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, ends: SharedEnds, whole: Collection[str] = ()
) -> tuple[SplitStep | ReplicateStep, ...]:
    """Return steps for what all devices of an interlaced pipeline run: its large parameters are split over all ranks,
    operations in `whole` are replicated, and the rest is done as is cheapest.

    Raises NnscalerError("plan_illegal") for a parameter that cannot be cut into as many parts.
    """
    mesh = plan.mesh_axes[0]
    made, axes = follow_batch(graph, signatures, plan, mesh)
    parts = dict(mesh)[SHARED]
    outside = set(graph.by_name) - ends.both
    options = _legal_options(graph, signatures, (SHARED, parts), outside.union(whole), made, axes)
    for name, identifiers in ends.cut.items():
        cut = tuple(c for c in options[name] if isinstance(c, Split) and c.identifier in identifiers)
        if not cut:
            raise NnscalerError(
                "plan_illegal",
                f"no parameter that {name} reads can be cut into {parts} parts, one for each rank of the pipeline",
                where=graph.by_name[name].where,
                help=f"it may be split along {', '.join(sorted(identifiers))}; take fewer ranks, or other operations; "
                "and --replicate none of them",
            )
        options[name] = cut
    return steps_of(graph, SHARED, cheapest_choices(graph, signatures, parts, options), ends.both)


def _options(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, whole: Collection[str]
) -> dict[str, tuple[Choice, ...]]:
    """Return the choices to compare, whole first: it wins ties."""
    candidates = all_candidates(graph, signatures, parts)
    taken: dict[str, set[Split]] = {op.name: set() for op in graph.operations}
    inputs = graph.with_role("input")
    for dim in range(max((len(tensor.shape) for tensor in inputs), default=0)):
        carried = [t for t in inputs if dim < len(t.shape) and t.shape[dim] >= parts]
        states = {t.name: Sharded(dim, 1, (), balanced(t.shape[dim], parts)) for t in carried}
        for name, found in reach(graph, signatures, parts, states).items():
            taken[name].update(found)
    result: dict[str, tuple[Choice, ...]] = {}
    for op in graph.operations:
        choices: list[Choice] = [RunInvariant()]
        if op.name not in whole:
            dims = {c.identifier for c in taken[op.name]}  # which other axes may cut in other places, when unevenly
            trained = any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None)
            left = (c for c in candidates[op.name] if c not in taken[op.name])
            choices += [c for c in left if not c.sizes or (trained and c.identifier not in dims)]
            choices += [RunPartial(slots) for slots in signatures[op.name].linear]
        result[op.name] = tuple(choices)
    return result


def steps_of(
    graph: Graph, axis: str, choices: Mapping[str, Choice], only: Collection[str] | None = None
) -> tuple[SplitStep | ReplicateStep, ...]:
    """Return choices as plan steps, operations with the same choice of the same operator together. `only`: of these
    operations."""
    groups: dict[tuple[str, Choice], list[str]] = {}
    for op in graph.operations if only is None else [op for op in graph.operations if op.name in only]:
        groups.setdefault((op.operator, choices[op.name]), []).append(op.name)
    return tuple(step_of(tuple(names), axis, choice) for (_, choice), names in groups.items())


def step_of(operations: tuple[str, ...], axis: str, choice: Choice) -> SplitStep | ReplicateStep:
    """Return one choice as a plan step."""
    if isinstance(choice, Split):
        how = (choice.identifier, choice.outer, choice.sections, choice.sizes, choice.circulating)
        return SplitStep(operations, axis, *how)
    if isinstance(choice, RunPartial):
        return ReplicateStep(operations, axis, partial=tuple(sorted(choice.slots)))
    return ReplicateStep(operations, axis, deferred=not isinstance(choice, RunInvariant))


# Pipeline parallelism: contiguous stages, balanced by cost, cut between layers or else at borders of modules.


def stages_of(
    graph: Graph, signatures: Mapping[str, Signature], devices: int, stages: int, within: bool = False
) -> StagePartition:
    """Cut the operations into stages of equal work, `devices` of them at a time on as many devices.

    `within`: cuts may lie within layers, also where there are as many layers as stages.

    Where a model runs its layers several times and differentiates the last run alone, and there are `devices` stages
    for each run, a part of the layers has one in every run. Raises NnscalerError("plan_illegal") when there are fewer
    operations than stages.
    """
    if stages > devices and stages == devices * len(runs_of(graph)):
        if within:
            raise _not_balanced("a model that runs its layers several times, whose parts are layers")
        return partition_runs(graph, signatures, devices)

    def cost(op: Operation) -> float:
        return work_of(graph, signatures, op)

    random = random_operators(signatures)
    return partition_stages(graph, stages, cost, finer=stages > devices, within=within, random=random)


def _not_balanced(what: str) -> NnscalerError:
    help = "leave balanced away; or take another schedule, such as 1f1b"
    return NnscalerError("plan_illegal", f"{BALANCED}=1 is not for {what}", help=help)


def assign_steps(graph: Graph, found: StagePartition) -> tuple[Step, ...]:
    """Return the stages of all operations as steps, those of the same stages together."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for op in graph.operations:
        groups.setdefault(tuple(found.stage_of[op.name]), []).append(op.name)
    return tuple(AssignStep(tuple(names), where) for where, names in sorted(groups.items()))


def make_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    sizes: Mapping[str, int],
    *,
    schedule: str | ScheduleKind | None = None,
    micro_batches: int | None = None,
    replicate: Sequence[str] = (),
    slices: tuple[int, ...] = (),
) -> Plan:
    """Return the product of the policies data_parallel, context_parallel, tensor_parallel and pipeline; with `zero`,
    parameters rest in shards.

    `micro_batches` None: as many as a given schedule is for; else twice the pipeline's devices, as far as the batch
    allows; 1 without a pipeline. `replicate`: patterns of modules or operations that tensor parallelism leaves whole.
    `slices`: shares of tokens, as `Plan` has.
    """
    dp, pp = sizes.get(DP, 1) * sizes.get(SHARD, 1), sizes.get(PP, 1)
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule or DEFAULT
    chunks = kind.chunks if pp > 1 else 1
    goes_round = kind.any_chunks and kind.places is stage_devices
    runs = len(runs_of(graph)) if chunks > 1 and goes_round else 1
    chunks = runs if runs > 1 else chunks
    whole = {op.name for op in select(graph, replicate)} if replicate else set()
    if micro_batches is None and kind.stream:
        micro_batches = 1  # each batch is one, with an update of its own
    if micro_batches is None and kind.only is not None:
        _, micro_batches = kind.only
    if micro_batches is None:
        micro_batches = largest_micro_batches(graph, 2 * pp, dp) if pp > 1 else 1
    plan = Plan(_mesh_of(sizes), (), micro_batches, slices=slices)
    plan = with_schedule(plan, schedule or DEFAULT.name, chunks)
    plan = replace(plan, data_axes=(DP, SHARD)) if SHARD in sizes else plan
    plan, steps = _inside(graph, signatures, sizes, plan, whole)
    if "zero" in sizes:
        over = [SHARD] if SHARD in sizes else [name for name, _ in plan.mesh if name in (DP, EP)]
        steps.extend(RestStep(("*",), axis, sizes["zero"], OWNED in sizes) for axis in over)
    return replace(plan, steps=tuple(steps))


def _inside(
    graph: Graph, signatures: Mapping[str, Signature], sizes: Mapping[str, int], plan: Plan, whole: set[str]
) -> tuple[Plan, list[Step]]:
    """Return the steps of experts, tokens, operators and stages, and the plan with its notes on them.

    `plan`: without steps; `whole`: the operations that tensor parallelism leaves whole.
    """
    cp, tp = sizes.get(CP, 1), sizes.get(TP, 1)
    on_tp: tuple[SplitStep | ReplicateStep, ...] = ()
    given: tuple[Step, ...] = ()  # to experts and tokens
    ends = _ends_of(graph, signatures, plan)
    cut = None
    if ends is not None and BALANCED in sizes:
        raise _not_balanced(f"schedule {plan.schedule}, whose ends lie on all devices")
    if ends is not None:
        cut = interlaced_stages(graph, signatures, plan.devices, ends)
    elif plan.stages > 1:
        cut = stages_of(graph, signatures, plan.devices, plan.stages, BALANCED in sizes)
    if sizes.get(EP, 1) > 1:
        plan = replace(plan, data_axes=(DP, EP))
        given = expert_steps(graph, signatures, plan, plan.device_axes[0], sizes[EP])
        plan = replace(plan, steps=given)
    if cp > 1 or tp > 1:
        made, axes = follow_batch(graph, signatures, plan, plan.device_axes[0])
        if cp > 1:
            choices, notes = context_parallel(graph, signatures, CP, cp, made, axes)
            given = (*given, *steps_of(graph, CP, choices))
            plan = replace(plan, notes=notes)
            made, axes = {name: (*before, choices[name]) for name, before in made.items()}, (*axes, (CP, cp))
        if tp > 1:
            apart = whole if ends is None else whole | ends.both
            on_tp = tensor_parallel(graph, signatures, TP, tp, apart, made, axes)
    steps: list[Step] = [*given, *on_tp]
    if ends is not None and cut is not None:
        steps = [*given, *of_layers(on_tp, cut), *over_all_ranks(graph, signatures, plan, ends, whole)]
    if cut is not None:
        steps.extend(assign_steps(graph, cut))
        plan = replace(plan, notes=(*plan.notes, *cut.notes))
    return plan, steps


def _ends_of(graph: Graph, signatures: Mapping[str, Signature], plan: Plan) -> SharedEnds | None:
    """Return what all devices of an interlaced pipeline run; None where every stage is on one device.

    Raises NnscalerError("plan_illegal") for other stages on several devices, of which nothing says what they run.
    """
    shared = [stage for stage, devices in enumerate(plan.places) if len(devices) > 1]
    if not shared:
        return None
    if plan.places != around(plan.devices, 1):
        message = f"schedule {plan.schedule} has stage {shared[0]} on the devices {list(plan.places[shared[0]])}"
        help = "write a plan.json that assigns operations to it; or take schedule interlaced, whose ends are shared"
        raise NnscalerError("plan_illegal", message, help=help)
    return shared_ends(graph, signatures)


def _mesh_of(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return the mesh's axes in rank order: of those of dp, ep has the inner ones."""
    ep, rest = sizes.get(EP, 1), tuple((n, sizes[n]) for n in (DP, SHARD, CP, TP, PP) if n in sizes)
    return rest if ep == 1 else (*batch_axes(sizes[DP], ep), *(axis for axis in rest if axis[0] != DP))
