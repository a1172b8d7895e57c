"""A plan as `paper.py` sees it: its program, priced on several clusters, and of what its seconds are made.

Nothing is taken from the planner's tables: a plan's program is made, its statements are priced one by one and its
schedule is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nnscaler.communication.communicated_graph import Compute, StageProgram, again_in, kept_inputs
from nnscaler.communication.stage_memory_and_work import stage_memory
from nnscaler.ir.graph import Graph, element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.layout import local_shape
from nnscaler.performance.predict_step_time import Prediction, Programmed, programmed
from nnscaler.performance.stage_prices import StagePrices
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.timeline import PassCosts, Timeline, simulate
from nnscaler.transform.plan import Plan

MEMORY = 32 * 2**30  # bytes of a rank
SMALL = 16  # samples with which some baselines of the paper's artifact ran

Costs = Mapping[str, CostModel]  # by cluster


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of the device that ends last.

    computing   operators, forward and backward
    again       operators that are recomputed in backward
    exchange    conversions and messages of micro-batches
    once        a step: gradients and parameters, work that all micro-batches share
    idle        the rest
    """

    computing: float = 0.0
    again: float = 0.0
    exchange: float = 0.0
    once: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.computing + self.again + self.exchange + self.once + self.idle


@dataclass(frozen=True)
class Simulated:
    """A plan that fits.

    system    whose space it is from
    policy    the ready policy that has its kind
    plan      in words
    axes      sizes of its axes
    parts     of the seconds of a step, by cluster
    memory    bytes of the rank that holds most
    small     seconds of a step with `SMALL` samples, by cluster; empty where dp is larger
    """

    system: str
    policy: str
    plan: str
    axes: Mapping[str, int]
    parts: Mapping[str, Parts]
    memory: float
    small: Mapping[str, float]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of a step, by cluster."""
        return {name: parts.total for name, parts in self.parts.items()}


@dataclass(frozen=True)
class Priced:
    """Figures of a program, before its schedule is simulated.

    plan         whose program it is
    program      itself
    prediction   by cluster
    memory       by pipeline device, bytes
    at_rest      of these, what no recomputation makes less: parameters, gradients and states of the optimizer
    """

    plan: Plan
    program: Programmed
    prediction: Mapping[str, Prediction]
    memory: Sequence[float]
    at_rest: Sequence[float]

    @property
    def fits(self) -> bool:
        return max(self.memory) <= MEMORY

    def parts(self) -> dict[str, Parts]:
        """Return the parts of the seconds on each cluster."""
        found = {}
        for name, prediction in self.prediction.items():
            stages = map(stage_parts, self.program.communicated.stages, prediction.prices)
            ends = zip(prediction.before, prediction.after, strict=True)
            found[name] = parts_of(prediction.timeline, tuple(stages), tuple(ends))
        return found

    def with_micro_batches(self, number: int) -> dict[str, float]:
        """Return, by cluster, the seconds of a step of so many micro-batches of the same samples each."""
        plan, edges = self.plan, self.program.communicated.edges
        kind = get_schedule(plan.schedule)
        order = kind(plan.devices, kind.chunks_of(plan.devices, plan.stages), number)
        found = {}
        for name, prediction in self.prediction.items():
            costs = PassCosts(prediction.forward, prediction.backward, prediction.weights)
            timeline = simulate(order, edges, costs, prediction.before)
            ends = zip(timeline.rows, prediction.after, strict=True)
            found[name] = max(row[-1].stop + after for row, after in ends)
        return found

    def bound(self, again: Collection[str]) -> dict[str, float]:
        """Return, by cluster, seconds below which no plan is that computes these operations again, in pieces or not,
        and is like this one else: this one's, and the time in which the busiest device would be busy."""
        found = {}
        for name, prediction in self.prediction.items():
            more = [0.0] * len(prediction.before)
            for program, prices in zip(self.program.communicated.stages, prediction.prices, strict=True):
                seconds = sum(
                    ahead
                    for statement, ahead in zip(program.forward, prices.forward, strict=True)
                    if isinstance(statement, Compute) and statement.operation.name in again
                )
                for device in program.stage.devices if program.gradient else ():
                    more[device] += program.stage.passes * seconds
            busy = [sum(span.stop - span.start for span in row) for row in prediction.timeline.rows]
            ends = zip(prediction.before, busy, more, prediction.after, strict=True)
            found[name] = max(prediction.seconds, *map(sum, ends))
        return found


def measure(graph: Graph, known: Mapping[str, Signature], plan: Plan, costs: Costs) -> Priced:
    """Price a plan. Raises NnscalerError for one that is not legal for the graph."""
    program = programmed(graph, known, plan)
    memory, at_rest = [0.0] * plan.devices, [0.0] * plan.devices
    for stage in stage_memory(program.communicated, program.order):
        memory[stage.role] += stage.total
        at_rest[stage.role] += stage.parameters + stage.gradients + stage.optimizer
    most = [0.0] * plan.devices
    for stage_program in program.communicated.stages:
        again = again_bytes(program.communicated.partitioned.graph, stage_program)
        for device in stage_program.stage.devices:
            most[device] = max(most[device], again)
    held = [here + again for here, again in zip(memory, most, strict=True)]
    return Priced(plan, program, {name: program.predicted(cost) for name, cost in costs.items()}, held, at_rest)


def again_bytes(graph: Graph, program: StageProgram) -> float:
    """Return the bytes that the largest recomputed layer keeps while it runs again, which `stage_memory` leaves out."""
    inside: dict[str, str] = {}
    kept: dict[str, dict[str, int]] = {}
    for i, statement in enumerate(program.forward):
        if not isinstance(statement, Compute) or statement.placement.chunk is not None:
            continue
        group = again_in(graph, program.forward, i)
        if group is None:
            continue
        inside.update((v.variable, group) for v in statement.outputs if v is not None)
        for version in kept_inputs(graph, statement):
            if inside.get(version.variable) == group:
                tensor = graph.tensors[version.tensor]
                shape = local_shape(version.layout, program.stage.sizes, tensor.shape)
                kept.setdefault(group, {})[version.variable] = prod(shape) * element_bytes(tensor.dtype)
    return float(max((sum(found.values()) for found in kept.values()), default=0))


def stage_parts(program: StageProgram, prices: StagePrices) -> Parts:
    """Return the parts of a stage's seconds for one micro-batch."""
    computing = again = exchange = 0.0
    pieces = zip(program.forward, prices.forward, prices.backward, prices.again, strict=True)
    for statement, ahead, behind, repeated in pieces:
        if isinstance(statement, Compute):
            computing, again = computing + ahead + behind, again + repeated
        else:
            exchange += ahead + behind + repeated
    exchange += sum(prices.arriving) + sum(prices.back) + prices.divided
    return Parts(computing, again, exchange)


def parts_of(timeline: Timeline, stages: Sequence[Parts], ends: Sequence[tuple[float, float]]) -> Parts:
    """Return the parts of a step. `stages`: of one micro-batch, by stage; `ends`: by device, its seconds before its
    first pass and after its last one."""
    stops = [(row[-1].stop if row else 0.0) + after for row, (_, after) in zip(timeline.rows, ends, strict=True)]
    last = max(range(len(stops)), key=stops.__getitem__)
    run = Counter(span.instruction.stage for span in timeline.rows[last] if span.instruction.kind == "F")
    passes = [run[stage] for stage in range(len(stages))]
    computing, again, exchange = (
        sum(often * getattr(parts, name) for often, parts in zip(passes, stages, strict=True))
        for name in ("computing", "again", "exchange")
    )
    once = sum(ends[last])
    idle = max(0.0, stops[last] - computing - again - exchange - once)
    return Parts(computing, again, exchange, once, idle)
