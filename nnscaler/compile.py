"""The pipeline of the compiler: trace, plan, partition, communicate, schedule, generate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch

from op_registry.registry import default_registry

from nnscaler.codegen.compiled_program import Origin, Program
from nnscaler.codegen.generate import generate, manifest
from nnscaler.codegen.python_text_of_calls import operator_files, operator_origins
from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.communication_volume import step_communication
from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.pipedream_restrictions import check_stream
from nnscaler.communication.recompute_cheap_outputs import as_light_as
from nnscaler.communication.search_pass_order import with_orders
from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.communication.stage_memory_and_work import stage_memory, stage_work
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.mixed_precision_dtypes import Precision, parse_precision
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.manifest import TimelineRows
from nnscaler.planning.auto_plan_request import AutoPlan, Decided, parse_auto, search_plan, told
from nnscaler.planning.named_policies import ReadyPlan, make_ready, parse_ready
from nnscaler.planning.parse_axes import BALANCED, parse_slices, parse_spec
from nnscaler.planning.plan_from_axes import make_plan
from nnscaler.planning.sharding.parameter_and_activation_memory import bytes_of_optimizer
from nnscaler.runtime.program.program_directory import describe_state
from nnscaler.runtime.program.user_operators import describe_operators
from nnscaler.scheduling.dependencies import check_acyclic
from nnscaler.scheduling.registry import check_schedule, get_schedule, schedule_of, with_schedule
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.scheduling.timeline import PassCosts, simulate, timeline_rows
from nnscaler.tracing import Traced, trace
from nnscaler.tracing.models_with_added_loss import LossFunction, origin_of_loss
from nnscaler.tracing.set_and_restore_modes import in_modes, modes_of
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.carry_plan_between_traces import carry
from nnscaler.transform.complete_plan import largest_micro_batches
from nnscaler.transform.plan import Plan, RecomputeStep
from nnscaler.transform.select_operations import matches

# Recomputation that the model itself asks for (`torch.utils.checkpoint`), as steps of a plan.


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


PlanSource = Plan | AutoPlan | str | Mapping[str, int] | Callable[[Graph, int], Plan] | None
Progress = Callable[[str, float, str], None]  # phase, seconds, what came out


@dataclass(frozen=True)
class WantedPlan:
    """The plan that a caller wants.

    ranks            that run the program
    plan             itself, or how it is made
    schedule         its name, or one that is given; None: the plan's
    micro_batches    None: what the pipeline needs, or the planner finds
    replicate        patterns of modules that tensor parallelism leaves whole
    precision        in which the model was traced
    optimizer_bytes  that the optimizer keeps of an element, for what is told of memory and for a search within it;
                     None: two float32 moments, as Adam does
    """

    ranks: int
    plan: PlanSource = None
    schedule: str | ScheduleKind | None = None
    micro_batches: int | None = 1
    replicate: Sequence[str] = ()
    precision: Precision | None = None
    optimizer_bytes: float | None = None


@dataclass(frozen=True)
class Planned:
    """A plan and why it was taken: for a plan that was searched, by what and in what time."""

    plan: Plan
    signatures: dict[str, Signature]
    why: str


def parallelize(
    module: torch.nn.Module,
    sample_inputs: Mapping[str, Any] | Sequence[Any],
    *,
    ranks: int,
    plan: PlanSource = None,
    schedule: str | ScheduleKind | None = None,
    micro_batches: int | None = 1,
    replicate: Sequence[str] = (),
    model: Mapping[str, str] | None = None,
    self_check: bool = True,
    specialise: bool = False,
    repeat_layers: str = "auto",
    loss_fn: LossFunction | None = None,
    precision: Precision | str | None = None,
    optimizer_bytes: float | None = None,
    progress: Progress | None = None,
) -> Program:
    """Compile a model into a program for `ranks` ranks: its scalar loss, and the other tensors that it returns.

    `sample_inputs`: one global batch, as keyword arguments (dict) or positional ones (tuple). `plan`: a `Plan`, a
    specification such as `dp=2,tp=2,pp=2`, a function of (graph, ranks) that returns a `Plan`, or what is to be
    searched: an `AutoPlan`, `auto:h100x8` (for that cluster), or `auto` and None (for this machine).
    `schedule`: its name (`nnscaler list schedules`), or one that `nnscaler.plan_source.read_schedule` read; None: the
    plan's. `micro_batches` None: what the pipeline needs, or the planner finds. `replicate`: patterns of modules that
    tensor parallelism leaves whole.
    `specialise`: where the model branches on data, take the branch of the sample batch. `loss_fn`: for a model that
    returns no loss, a function of its outputs and the batch; without either, the program only runs forward.
    `precision`: mixed precision, a `Precision` or its text (`bfloat16`); parameters rest in the model's dtypes.
    `optimizer_bytes`: that the optimizer keeps of an element (8: two float32 moments), for what is told of memory and
    for a search within it.
    `repeat_layers`: "auto" traces one of many equal layers and copies it ("always" of two, "off" of none); see `trace`.
    Raises NnscalerError: trace_failed, trace_unfaithful, plan_illegal, plan_too_large, micro_batches_coupled, ...
    """
    report = progress or (lambda phase, seconds, text: None)
    start = time.perf_counter()
    if isinstance(precision, str):
        precision = parse_precision(precision)
    if precision is None and isinstance(plan, Plan):
        precision = plan.precision
    traced = trace(
        module,
        sample_inputs,
        self_check=self_check,
        specialise=specialise,
        repeat_layers=repeat_layers,
        loss_fn=loss_fn,
        precision=precision,
    )
    text = f"{len(traced.graph.operations)} operations" + (f", {traced.repeats}" if traced.repeats else "")
    report("trace", time.perf_counter() - start, text)
    described = {"name": type(module).__name__} if model is None else dict(model)
    if loss_fn is not None:
        described["loss"] = origin_of_loss(loss_fn)
    wanted = WantedPlan(ranks, plan, schedule, micro_batches, replicate, precision, optimizer_bytes)
    program = compile_traced(traced, wanted, model=described, progress=progress)
    assert traced.sample is not None
    origin = Origin(module, traced.sample.rebuild, loss_fn, specialise, repeat_layers, modes=modes_of(module))
    return replace(program, origin=origin)


def for_batch(program: Program, batch: Mapping[str, torch.Tensor], *, training: bool) -> Program:
    """Compile the program's model again, for global batches of the sizes of `batch`, under the same plan.

    `training` False: with the whole model in evaluation mode. Where the plan cannot cut such a batch (fewer samples
    than data parts, say), every rank computes all of it: the program's plan then has no data axes. Parameters rest as
    in `program`. Raises NnscalerError as `parallelize`; "size_not_compiled" for a program without its model.
    """
    origin = program.origin
    if origin is None:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        raise NnscalerError(
            "size_not_compiled",
            f"the program is for another batch than {sizes}, and was made without its model",
            help="start from the Program that nnscaler.parallelize returns, which has the model",
        )
    if origin.resize is not None:
        origin.resize(batch)
    args, kwargs = origin.rebuild(batch)
    trained = {name for entry in program.manifest.parameters if entry.trainable for name in entry.fqns}
    named = dict(origin.module.named_parameters(remove_duplicate=False))
    flags = {parameter: parameter.requires_grad for parameter in named.values()}
    try:
        for name, parameter in named.items():  # it may have been frozen since, for another program of this model
            parameter.requires_grad_(name in trained)
        with in_modes(origin.module, origin.modes, training=training), warnings.catch_warnings():
            # the notes were told when the program was compiled; of evaluation mode not all
            warnings.filterwarnings("ignore", "" if training else "(?!forward changes attributes)")
            traced = trace(
                origin.module,
                kwargs or args,
                self_check=False,  # the model was checked; every size would cost two more runs of it
                specialise=origin.specialise,
                repeat_layers=origin.repeat_layers,
                loss_fn=origin.loss_fn,
                precision=program.plan.precision,
            )
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    ranks, refused = program.manifest.ranks, None
    for plan in _plans_for(program, traced.graph):
        try:
            made = compile_traced(
                traced, WantedPlan(ranks, plan, precision=plan.precision), model=program.manifest.model
            )
        except NnscalerError as error:
            refused = refused or error
        else:
            return replace(made, origin=origin)
    assert refused is not None
    raise refused


def _plans_for(program: Program, graph: Graph) -> Iterator[Plan]:
    """Yield the program's plan for another graph of its model, with as many micro-batches as its batch takes; then the
    same without data axes."""
    plan = carry(program.plan, program.graph, graph)
    for axes in dict.fromkeys((plan.data_axes, ())):
        kept = replace(plan, data_axes=axes)
        yield kept.with_micro_batches(largest_micro_batches(graph, plan.micro_batches, kept.data_parts))


def compile_traced(
    traced: Traced, wanted: WantedPlan, *, model: Mapping[str, str], progress: Progress | None = None
) -> Program:
    """Compile as `parallelize`, from a traced model on."""
    report = progress or (lambda phase, seconds, text: None)
    start = time.perf_counter()
    planned = make(traced.graph, wanted)
    chosen = replace(planned.plan, precision=wanted.precision)
    in_time = f", {chosen.micro_batches} micro-batches, {chosen.schedule}" if chosen.devices > 1 else ""
    report("plan", time.perf_counter() - start, f"{chosen.describe()}{in_time}: {planned.why}")
    start = time.perf_counter()
    partitioned = apply_plan(traced.graph, planned.signatures, chosen)
    communicated = materialise(partitioned, planned.signatures)
    ordered = with_orders(
        chosen, communicated, planned.signatures, limit_of(wanted.schedule), bytes_of_optimizer(wanted.optimizer_bytes)
    )
    if ordered is not chosen:
        report("order", time.perf_counter() - start, ordered.notes[-1])
    chosen = ordered
    order = schedule_of(chosen, communicated.without_gradient)
    check_acyclic(order, communicated.edges)
    check_stream(communicated, order)
    report("communicate", time.perf_counter() - start, f"{len(communicated.stages)} stages")
    start = time.perf_counter()
    functions = {name: opaque.function for name, opaque in traced.functions.items()}
    origins = operator_origins((op.operator for op in traced.graph.operations), functions)
    sources = generate(communicated, order, chosen, model.get("name", traced.graph.name), origins)
    described = manifest(communicated, order, chosen, sources, planned.signatures, model)
    report("generate", time.perf_counter() - start, f"{len(sources)} role programs")
    start = time.perf_counter()
    communication = step_communication(communicated, order)
    described = replace(
        described,
        communication_profile=communication.record,
        timeline=step_timeline(communicated, order, planned.signatures),
        memory=stage_memory(communicated, order, bytes_of_optimizer(wanted.optimizer_bytes)),
        operator_files=describe_operators(operator_files(origins)),
        state=describe_state(traced.state),
        batch=describe_state(traced.inputs),
    )
    report("profile", time.perf_counter() - start, f"{len(communication.classes)} classes of communication")
    return Program(sources, described, chosen, traced.graph, traced.state, traced.inputs)


def limit_of(schedule: str | ScheduleKind | None) -> float:
    """Return the bytes of a rank within which the orders of a schedule are searched; inf where there is no limit."""
    given = schedule.within if isinstance(schedule, ScheduleKind) else None
    return inf if given is None else given


def step_timeline(
    communicated: CommunicatedGraph, order: Schedule, signatures: Mapping[str, Signature]
) -> TimelineRows:
    """Return the timeline of a step, by a model of the work of its stages."""
    work = stage_work(communicated, signatures)
    timeline = simulate(
        order,
        communicated.edges,
        PassCosts(
            [w.forward for w in work],
            [w.backward for w in work],
            [w.weights for w in work],
            slices=[w.slices for w in work if w.slices],
        ),
    )
    ranks = [ranks_text(ranks) for ranks in communicated.partitioned.devices]
    unit = max(w.forward for w in work)
    return timeline_rows(timeline, ranks, unit)


def make(graph: Graph, wanted: WantedPlan) -> Planned:
    """Make the plan that the caller wants, checked against its number of ranks."""
    known = dict(signatures(graph, default_registry()))
    plan, ranks = wanted.plan, wanted.ranks
    if isinstance(plan, Plan):
        return Planned(_under(plan.for_ranks(ranks), wanted.schedule), known, "as given")
    if callable(plan):
        made = plan(graph, ranks)
        if not isinstance(made, Plan):
            raise NnscalerError("plan_illegal", f"the policy returned {type(made).__name__}, not an nnscaler.Plan")
        if made.precision not in (None, wanted.precision):
            message = (
                f"the policy's plan has the precision {made.precision.describe()}, and the model is traced without"
            )
            raise NnscalerError("plan_illegal", message, help="precision=..., or --precision, beside the policy")
        made = with_checkpoints(_under(made.for_ranks(ranks), wanted.schedule), graph)
        return Planned(made, known, f"made by {getattr(plan, '__name__', 'the policy')}")
    search = searched(plan)
    if search is not None:
        return _search(graph, known, search, wanted)
    assert plan is not None and not isinstance(plan, AutoPlan), "it is searched"
    ready = parse_ready(plan) if isinstance(plan, str) else None
    how: dict[str, Any] = {n: getattr(wanted, n) for n in ("schedule", "micro_batches", "replicate")}
    if ready is not None:
        sizes, source = dict(ready.for_ranks(ranks)), f"ready policy {plan}"
        made_for = partial(_made_ready, graph, known, ready, ranks, how)
    else:
        spec = plan if isinstance(plan, str) else ",".join(f"{n}={v}" for n, v in plan.items())
        sizes, source = parse_spec(spec, ranks), "as asked"
        made_for = partial(make_plan, graph, known, slices=parse_slices(spec), **how)
    made = with_checkpoints(made_for(sizes), graph)
    if BALANCED in sizes and not any(isinstance(step, RecomputeStep) for step in made.steps):
        whole = {name: size for name, size in sizes.items() if name != BALANCED}
        with suppress(NnscalerError):  # which is said of the plan itself, or layers are too few
            made = as_light_as(made, made_for(whole), graph, known, bytes_of_optimizer(wanted.optimizer_bytes))
    return Planned(made, known, "; ".join((source, *made.notes)))


def _made_ready(
    graph: Graph, known: dict[str, Signature], ready: ReadyPlan, ranks: int, how: dict[str, Any], sizes: dict[str, int]
) -> Plan:
    return make_ready(graph, known, replace(ready, sizes=sizes), ranks, **how)


def _under(plan: Plan, schedule: str | ScheduleKind | None) -> Plan:
    """Return a plan that exists under another schedule, for as many stages as it has. Raises NnscalerError."""
    if schedule is None:
        return plan
    kind = get_schedule(schedule) if isinstance(schedule, str) else schedule
    if kind.within is not None and kind.chunks == 1:
        return replace(plan, schedule=kind.name, orders=())  # its stages stay where they are
    says = isinstance(schedule, str) and ":" in schedule  # how many stages are on each device
    found = with_schedule(plan, schedule, None if says else kind.chunks_of(plan.devices, plan.stages))
    if found.stages != plan.stages:
        message = f"schedule {found.schedule} is for {found.stages} stages, and the plan has {plan.stages}"
        raise NnscalerError("plan_illegal", message, help="let the plan be made for the schedule: --plan pp=2")
    return found


def searched(plan: PlanSource) -> AutoPlan | None:
    """Return the request of a plan that is to be searched; None for a plan that is named."""
    if plan is None:
        return AutoPlan()
    if isinstance(plan, str):
        return parse_auto(plan)
    return plan if isinstance(plan, AutoPlan) else None


def _search(graph: Graph, known: dict[str, Signature], search: AutoPlan, wanted: WantedPlan) -> Planned:
    """Search a plan: of the schedule that is asked for, or of any. One whose orders are to be searched takes the place
    of the one that was found, for its stages."""
    check_schedule(wanted.schedule, searched=True)
    start = time.perf_counter()
    kind = get_schedule(wanted.schedule) if isinstance(wanted.schedule, str) else wanted.schedule
    polished = kind is not None and kind.within is not None
    order, optimizer = None if polished else wanted.schedule, wanted.optimizer_bytes
    decided = Decided(wanted.micro_batches, wanted.replicate, optimizer_bytes=optimizer, schedule=order)
    found = search_plan(graph, known, wanted.ranks, search, decided)
    plan = _under(found.plan, wanted.schedule) if polished else found.plan
    return Planned(with_checkpoints(plan, graph), known, told(found, time.perf_counter() - start))
