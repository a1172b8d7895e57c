"""Predict the time of a step of a program by a cost model: its statements priced one by one, its schedule replayed.

The planner prices choices; this prices the program that came of them, with the conversions that it really has, so that
the two can be compared, and any plan can be given a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from nnscaler.communication.backward_halves import statement_halves
from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    Message,
    StageProgram,
    Stored,
    repeated_in_backward,
    runs_again,
    times_of,
)
from nnscaler.communication.materialise import materialise
from nnscaler.communication.profile import StepCommunication, step_communication
from nnscaler.communication.rest_moves import RestMove, RestPhase, moves_of
from nnscaler.instructions import Instruction, StageEdge
from nnscaler.ir.graph import Graph, element_bytes
from nnscaler.ir.layout import MICRO, Partial, full_along, local_shape
from nnscaler.ir.placement import Stage
from nnscaler.ir.signature import Signature
from nnscaler.planning.cost.collectives import seconds_per_byte, summed_seconds
from nnscaler.planning.cost.model import AxisPlace, Collective, CostModel
from nnscaler.planning.cost.work import computes_in
from nnscaler.scheduling.dependencies import check_acyclic, dependencies
from nnscaler.scheduling.registry import schedule_of
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, Span, Timeline, simulate, timeline_of
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan

# Event simulation of a schedule on devices that share the cores of one machine: a device is faster while others
# wait.


def simulate_crowded(
    schedule: Schedule,
    edges: Collection[StageEdge],
    costs: PassCosts,
    ranks: Sequence[int],
    relief: Callable[[int], float],
) -> Timeline:
    """Simulate as `timeline.simulate`, with costs per stage that hold while every rank computes.

    `ranks`: of each device; `relief(n)`: the share of its cost that an instruction takes while n ranks compute. A
    device that waits computes nothing.
    """
    check_acyclic(schedule, edges)
    waits = dependencies(schedule, edges)
    position = [0] * len(schedule.orders)
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    finished: set[Instruction] = set()
    running: dict[int, tuple[Instruction, float, float]] = {}  # device: what, since when, cost that is left
    now = 0.0
    while True:
        for device, order in enumerate(schedule.orders):
            if device not in running and position[device] < len(order):
                instruction = order[position[device]]
                if all(w in finished for w in waits[instruction]):
                    running[device] = instruction, now, costs.of(instruction)
        if not running:
            return timeline_of(schedule, rows)
        share = relief(sum(ranks[device] for device in running))
        passed = min(left for _, _, left in running.values())
        now += passed * share
        for device, (instruction, start, left) in list(running.items()):
            if left <= passed:
                rows[device].append(Span(instruction, start, now))
                finished.add(instruction)
                position[device] += 1
                del running[device]
            else:
                running[device] = instruction, start, left - passed


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step.

    seconds    of the whole step
    forward    per stage, of one micro-batch
    backward   per stage, of one micro-batch
    weights    per stage, of one micro-batch: the part of `backward` that its second half, W, takes
    once       per stage, gathers of parameters and sums of gradients at the rate of full buckets, and work that all
               micro-batches share
    beside     per stage, time that the planner's tables leave out: the buckets' own latency, sums of the loss, and
               overheads of every step
    timeline   when each pass runs
    """

    seconds: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    once: tuple[float, ...]
    beside: tuple[float, ...]
    timeline: Timeline


def predict(
    communicated: CommunicatedGraph, order: Schedule, signatures: Mapping[str, Signature], cost: CostModel
) -> Prediction:
    """Predict one step of a program. A message takes its time where it is received: senders do not wait."""
    graph = communicated.partitioned.graph
    found = [_stage(graph, program, signatures, cost) for program in communicated.stages]
    forward, backward, weights, once, beside = (tuple(values) for values in zip(*found, strict=True))
    edges, overheads = communicated.edges, cost.overheads
    costs = PassCosts(forward, backward, weights)
    if overheads.crowding:
        ranks = {p.stage.device: len(p.stage.mesh.ranks) for p in communicated.stages}
        counts = [ranks[device] for device in range(len(order.orders))]
        timeline = simulate_crowded(order, edges, costs, counts, overheads.relief)
        all_ranks = overheads.relief(sum(counts))
    else:
        timeline, all_ranks = simulate(order, edges, costs), 1.0
    last = max(a + b for a, b in zip(once, beside, strict=True))
    return Prediction(timeline.makespan + last * all_ranks, forward, backward, weights, once, beside, timeline)


def place_of(stage: Stage, axis: str) -> AxisPlace:
    """Return where an axis lies among the ranks of a stage: the last one varies fastest."""
    names = [a.name for a in stage.mesh.axes]
    position = names.index(axis)
    inner = prod(a.size for a in stage.mesh.axes[position + 1 :])
    return AxisPlace(stage.mesh.axes[position].size, inner)


def _stage(
    graph: Graph, program: StageProgram, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float, float, float, float]:
    stage = program.stage
    forward = backward = 0.0
    again = repeated_in_backward(graph, program.forward)
    weights = divided = _moved(graph, program, cost, {"B"})
    halves = statement_halves(graph, program)
    for i, statement in enumerate(program.forward):
        times = times_of(statement, stage)
        if isinstance(statement, Compute):
            ahead, behind = _compute(graph, stage, statement, signatures, cost)
            repeated = ahead + cost.overheads.again if runs_again(statement) else 0.0
        elif isinstance(statement, Convert):
            ahead, behind = _convert(graph, stage, statement, cost)
            repeated = ahead if i in again else 0.0
        else:
            forward += cost.overheads.statement * len(statement.targets)
            continue
        forward += ahead * times
        backward += (behind + repeated) * times
        weights += (halves[i].gradients * behind + halves[i].again * repeated) * times
    backward += divided
    for message in program.receives:
        forward += _sent(graph, stage, message, cost)
    for message in program.sends:
        backward += _sent(graph, stage, message, cost) if message.needs_grad else 0.0
    if not program.gradient:
        backward = weights = 0.0
    return forward, backward, weights, _once(graph, program, signatures, cost), _beside(graph, program, cost)


def _sent(graph: Graph, stage: Stage, message: Message, cost: CostModel) -> float:
    tensor = graph.tensors[message.tensor]
    size = prod(local_shape(message.target.layout, stage.sizes, tensor.shape)) * element_bytes(tensor.dtype)
    return cost.collective("send", size, AxisPlace(2, len(stage.mesh.ranks)))


def _once(graph: Graph, program: StageProgram, signatures: Mapping[str, Signature], cost: CostModel) -> float:
    stage, once = program.stage, 0.0
    for statement in program.prepare:
        if isinstance(statement, Compute):
            once += _compute(graph, stage, statement, signatures, cost)[0]
        elif isinstance(statement, Convert):
            once += _convert(graph, stage, statement, cost)[0]
    return once + _moved(graph, program, cost, {"gather", "gradient"})


def _moved(graph: Graph, program: StageProgram, cost: CostModel, phases: Collection[RestPhase]) -> float:
    """Return the seconds in which parameters go between rest and their leaves in one of these phases, at the rate of
    full buckets."""
    stage = program.stage
    return sum(
        _rate(stage, move, cost) * move.bytes(stage, graph.tensors[stored.tensor].shape)
        for stored, move in moves_of(graph, program)
        if move.phase in phases
    )


def _rate(stage: Stage, move: RestMove, cost: CostModel) -> float:
    return sum(seconds_per_byte(cost, place_of(stage, axis), move.kind) for axis in move.axes)


def _beside(graph: Graph, program: StageProgram, cost: CostModel) -> float:
    """Return the seconds that the runtime's buckets take above those of their bytes at full rate, and those of the sum
    of the loss."""
    stage, beside = program.stage, cost.overheads.step
    buckets: dict[tuple[RestPhase, Collective, int, str, AxisPlace], int] = {}
    for stored, move in moves_of(graph, program):
        place, size = _holders(stage, stored, move), move.bytes(stage, graph.tensors[stored.tensor].shape)
        if place.size > 1:
            key = move.phase, move.kind, move.times(stage), move.dtype, place
            buckets[key] = buckets.get(key, 0) + size
        beside -= _rate(stage, move, cost) * size * move.times(stage)
    for (_, kind, times, _, place), size in buckets.items():
        beside += times * summed_seconds(cost, place, size, kind)
    if program.loss is not None:
        size = element_bytes(graph.tensors[program.loss.tensor].dtype)
        for axis, state in zip(stage.names, program.loss.layout, strict=True):
            if isinstance(state, Partial) and axis != MICRO:
                beside += cost.collective("all_reduce", size, place_of(stage, axis))
    return beside


def _holders(stage: Stage, stored: Stored, move: RestMove) -> AxisPlace:
    """Return the ranks that make a move in one group: over axes, and, for sums, over stages that share the
    parameter."""
    axes = [place_of(stage, axis) for axis in move.axes]
    inner = min((place.inner for place in axes), default=len(stage.mesh.ranks))
    copies = max(1, len(stored.copies)) if move.kind == "all_reduce" else 1
    return AxisPlace(prod(place.size for place in axes) * copies, inner)


def _compute(
    graph: Graph, stage: Stage, statement: Compute, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float]:
    outputs = [None if v is None else graph.tensors[v.tensor] for v in statement.outputs]
    inputs = [graph.tensors[v.tensor] for v in statement.inputs]
    shapes_in = [local_shape(v.layout, stage.sizes, t.shape) for v, t in zip(statement.inputs, inputs, strict=True)]
    shapes_out = [
        None if v is None or t is None else local_shape(v.layout, stage.sizes, t.shape)
        for v, t in zip(statement.outputs, outputs, strict=True)
    ]
    dtype = computes_in(t.dtype for t in (*inputs, *outputs) if t is not None)
    signature = signatures[statement.operation.name]
    forward, backward = cost.compute(signature, shapes_in, shapes_out, dtype)
    return forward, backward if any(t is not None and t.needs_grad for t in outputs) else 0.0


def _convert(graph: Graph, stage: Stage, statement: Convert, cost: CostModel) -> tuple[float, float]:
    move, tensor = statement.move, graph.tensors[statement.source.tensor]
    name = stage.names[move.axis]
    if move.axis >= stage.first_in_time:
        return 0.0, 0.0
    size = prod(full_along(move.source, stage.sizes, tensor.shape, move.axis)) * element_bytes(tensor.dtype)

    def seconds(kind: str | None) -> float:
        return 0.0 if kind is None else cost.collective(cast(Collective, kind), size, place_of(stage, name))

    started = cost.overheads.statement

    return started + seconds(move.row.forward), seconds(move.row.backward) if tensor.needs_grad else 0.0


# Replay a plan: its program is made as far as its communication, priced, and its schedule simulated.


@dataclass(frozen=True)
class Replay:
    """One step of the program of a plan, by a cost model.

    plan           what was replayed
    communicated   its program, as far as its communication
    order          the schedule
    prediction     times of stages and passes
    busy           by pipeline device, the share of the step in which it computes or communicates
    profile        what every rank sends
    sent           by pipeline device, the bytes that a rank of it sends in ring algorithms
    """

    plan: Plan
    communicated: CommunicatedGraph
    order: Schedule
    prediction: Prediction
    busy: tuple[float, ...]
    profile: StepCommunication
    sent: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.prediction.seconds


@dataclass(frozen=True)
class Programmed:
    """The program of a plan, as far as its communication, with the order of its passes and all of its signatures."""

    communicated: CommunicatedGraph
    order: Schedule
    signatures: Mapping[str, Signature]

    def predicted(self, cost: CostModel) -> Prediction:
        """Predict one step by a cost model."""
        return predict(self.communicated, self.order, self.signatures, cost)


def programmed(graph: Graph, signatures: Mapping[str, Signature], plan: Plan) -> Programmed:
    """Make the program of a plan, as far as its communication.

    Raises NnscalerError for a plan that is not legal for the graph.
    """
    known = dict(signatures)  # `apply_plan` adds those of operations that it makes
    communicated = materialise(apply_plan(graph, known, plan), known)
    return Programmed(communicated, schedule_of(plan, communicated.without_gradient), known)


def replay(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, cost: CostModel) -> Replay:
    """Predict one step of a plan. Raises NnscalerError for a plan that is not legal for the graph."""
    program = programmed(graph, signatures, plan)
    communicated, order = program.communicated, program.order
    found = program.predicted(cost)
    working = [sum(span.stop - span.start for span in row) for row in found.timeline.rows]
    for stage, once in zip(communicated.stages, found.once, strict=True):
        working[stage.stage.device] += once
    busy = tuple(seconds / found.seconds if found.seconds else 0.0 for seconds in working)
    profile = step_communication(communicated, order)
    sent = [0.0] * plan.devices
    for calls in profile.classes:
        sent[order.devices[calls.call.stage]] += calls.wire_bytes
    return Replay(plan, communicated, order, found, busy, profile, tuple(sent))
