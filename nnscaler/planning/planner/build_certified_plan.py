"""Turn the best configuration found into a plan with its certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nnscaler.errors import few
from nnscaler.ir.graph import Operation
from nnscaler.ir.operation_placement import Choice, RunInvariant
from nnscaler.planning.constraints.interlaced import between_ends, of_layers
from nnscaler.planning.context_and_expert_parallel import LONG, batch_axes, expert_steps
from nnscaler.planning.plan_from_axes import assign_steps, steps_of
from nnscaler.planning.planner.branch_and_bound import Search
from nnscaler.planning.planner.evaluate_configuration import Evaluated
from nnscaler.planning.planner.interlaced_end_costs import ends_of
from nnscaler.planning.planner.planner_graph import MANY, PlanningCache
from nnscaler.scheduling.registry import with_schedule
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.transform.partition_stages import StagePartition, StageRules, partition_stages, random_operators
from nnscaler.transform.plan import CP, DP, EP, PP, SHARED, TP, Plan, RecomputeStep, RestStep, Step

SEARCHED = (
    "dp, tp and pp with this product; ep that divides dp and the experts; every legal choice of every operation on "
    "tp; micro-batches that divide the batch; recomputing all layers or none, or, of many equal ones, any; all "
    "parameters whole on dp, or in shards between steps (ZeRO-1), with their gradients (ZeRO-2), or at all times "
    "(ZeRO-3); cuts between layers (without numbered ones, or with fewer than {many}, at borders of modules too, with "
    "cheap outputs computed again) that balance the stages; the schedules {schedules}, where the figures of their "
    "steps hold, by the bounds of which they are pruned; where a device has several stages, all of them begin in one "
    "layout"
)
OF_TOKENS = f"cp beside these, a power of two, where attention has {LONG} rows or more"
NOT_SEARCHED = (
    "orders that are none of these schedules' (`--schedule search` does, for the stages of a plan); strategies that "
    "are slower in a whole pass and hold no less; cuts within layers of models with {many} or more, or of interlaced "
    "pipelines; where stages are cut at borders of modules, recomputation of what is not cheap; splits on the dp axis "
    "other than that of the batch; stages of unlike meshes; sharding some parameters only, or over some ranks of dp; "
    "several versions of one tensor, each converted from where it is made; overlap of communication and computation"
)


def _titled(kind: ScheduleKind) -> str:
    assert kind.figures is not None
    chunks = kind.figures.chunks
    return kind.title + (f" of {chunks[0]} to {chunks[-1]} stages a device" if len(chunks) > 1 else "")


@dataclass(frozen=True)
class Certificate:
    """Proof of how good a plan is, within the space that was searched and by the cost model.

    configuration   in words: `dp=2 tp=2, 4 micro-batches`
    seconds         of one step, by the planner's tables
    bound           seconds of a step that no plan in the space goes below
    gap             share of `seconds` that the optimum may be below them
    memory          bytes of the rank that holds most
    memory_limit    bytes that a rank may hold
    solved          configurations that were solved
    left            configurations that were pruned by their bounds
    too_large       configurations in which nothing fits, or nothing was found to fit
    cost_model      identity of the cost model
    cluster         name of the cluster
    schedules       of pipelines, that were searched
    runners_up      other solved configurations: (configuration, seconds, whether it fits)
    """

    configuration: str
    seconds: float
    bound: float
    gap: float
    memory: float
    memory_limit: float
    solved: int
    left: int
    too_large: int
    cost_model: str
    cluster: str
    schedules: tuple[ScheduleKind, ...]
    runners_up: tuple[tuple[str, float, bool], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate as JSON data."""
        return {
            "configuration": self.configuration,
            "objective_seconds": self.seconds,
            "bound_seconds": self.bound,
            "gap": self.gap,
            "memory_bytes": round(self.memory),
            "memory_limit_bytes": round(self.memory_limit),
            "configurations": {"solved": self.solved, "pruned": self.left, "too_large": self.too_large},
            "searched": f"{SEARCHED.format(schedules=', '.join(map(_titled, self.schedules)), many=MANY)}; {OF_TOKENS}",
            "not_searched": NOT_SEARCHED.format(many=MANY),
            "cost_model": self.cost_model,
            "cluster": self.cluster,
            "seed": 0,  # nothing is drawn
            "runners_up": [{"configuration": c, "seconds": s, "fits": fits} for c, s, fits in self.runners_up],
        }


def certificate(subject: PlanningCache, found: Search, cluster: str, memory: float) -> Certificate:
    """Return the certificate of the best plan of a search that found one."""
    best = found.best
    assert best is not None
    others = tuple((str(e), e.seconds, e.fits) for e in found.solved if e is not best)[:5]
    return Certificate(
        str(best),
        best.seconds,
        found.bound,
        found.gap,
        best.memory,
        memory,
        len(found.solved),
        found.left,
        found.too_large,
        subject.cost.identity,
        cluster,
        subject.schedules,
        others,
    )


def choices_of(subject: PlanningCache, found: Evaluated) -> dict[str, Choice]:
    """Return, by operation, its choice on tp."""
    made = zip(subject.graph.operations, found.choices, strict=False)  # nodes of tensors follow
    strategies = found.tables.strategies
    return {
        op.name: strategies[op.name][k].choices[0] if strategies[op.name][k].choices else RunInvariant()
        for op, k in made
    }


def plan_of(subject: PlanningCache, found: Evaluated) -> Plan:
    """Return the plan that runs a configuration with the choices found for it."""
    c, graph = found.configuration, subject.graph
    batch = batch_axes(c.dp, c.ep)
    inner = ((CP, c.cp), (TP, c.tp), (PP, c.pp))
    mesh = (*batch, *(axis for axis in inner if axis[1] > 1)) or ((DP, 1),)
    plan = Plan(mesh, (), c.micro_batches)
    experts: tuple[Step, ...] = ()
    if c.ep > 1:
        plan = replace(plan, data_axes=(DP, EP))
        experts = expert_steps(graph, subject.signatures, plan, plan.device_axes[0], c.ep)
    on_tp = steps_of(graph, TP, choices_of(subject, found)) if c.tp > 1 else ()
    steps: list[Step] = [*experts, *on_tp]
    notes: tuple[str, ...] = ()
    if c.cp > 1:
        steps = [*experts, *steps_of(graph, CP, subject.tokens(c)), *on_tp]
    if c.pp > 1:
        cut = partition_of(subject, found)
        ends = subject.constraint.ends
        if ends is not None:
            cut = between_ends(graph, subject.signatures, cut, ends)
            shared = steps_of(graph, SHARED, ends_of(subject, c).choices, ends.both)
            steps = [*experts, *of_layers(on_tp, cut), *shared]
        steps.extend(assign_steps(graph, cut))
        notes = cut.notes
    steps.extend(RecomputeStep(subject.layers[number].operations) for number in sorted(found.again.layers))
    steps.extend(RecomputeStep(one.operations) for one in found.again.outputs)
    if found.again.outputs:
        names = [name for one in found.again.outputs for name in one.again]
        notes = (*notes, f"computed again in backward, or a rank would keep too much: {few(names, 6)}")
    steps.extend(
        replace(step, axis=axis) for step in c.parameters.steps if isinstance(step, RestStep) for axis, _ in batch
    )
    return with_schedule(replace(plan, steps=tuple(steps), notes=notes), c.schedule, c.chunks)


def partition_of(subject: PlanningCache, found: Evaluated) -> StagePartition:
    """Cut the graph into the stages of a pipeline.

    Raises NnscalerError("plan_illegal") where the graph cannot be cut so.
    """
    seconds = operation_seconds(subject, found)
    random = random_operators(subject.signatures)
    count = len(subject.layers)
    edges = [min(max(stage.items[1] - 1, 0), count) for stage in found.stages]  # layers before the end of each stage
    counts = [end - start for start, end in pairwise([0, *edges])]

    def cost(op: Operation) -> float:
        return seconds[op.name]

    kept = subject.constraint
    return partition_stages(
        subject.graph,
        found.configuration.pp * found.configuration.chunks,
        cost,
        random=random,
        rules=StageRules(counts, dict(kept.at), kept.together, subject.blocks),
    )


def operation_seconds(subject: PlanningCache, found: Evaluated) -> Mapping[str, float]:
    """Return, by operation, the seconds of one micro-batch with the conversions of the tensors that it reads."""
    names = [op.name for op in subject.graph.operations]
    total = dict.fromkeys(names, 0.0)
    choices, tables = found.choices, found.tables
    for i, name in enumerate(names):
        columns = tables.columns[i]
        again = columns.again[choices[i]] if tables.groups[i] in found.again.layers else 0.0
        total[name] += float(columns.forward[choices[i]] + columns.backward[choices[i]] + again)
    for first, second, table in tables.edges:
        reader = names[second] if second < len(names) else names[first]
        total[reader] += float(table[choices[first], choices[second]])
    return total
