"""Predict the time of a step of a program by a cost model: its statements priced one by one, its schedule replayed.

The planner prices choices; this prices the program that came of them, with the conversions that it really has, so that
the two can be compared, and any plan can be given a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import cast

from nnscaler.communication.backward_halves import StatementHalves, statement_halves
from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    Message,
    StageProgram,
    Statement,
    repeated_in_backward,
    runs_again,
    times_of,
)
from nnscaler.communication.materialise import materialise
from nnscaler.communication.profile import StepCommunication, step_communication
from nnscaler.communication.profile_memory import stage_work
from nnscaler.communication.rest_moves import RestMove, RestPhase, moves_of
from nnscaler.communication.searched_order import with_orders
from nnscaler.ir.graph import Graph, element_bytes
from nnscaler.ir.layout import full_along, local_shape
from nnscaler.ir.placement import Stage
from nnscaler.ir.rotations import Direction, as_computed, rotations
from nnscaler.ir.signature import Signature
from nnscaler.performance.calls_around import PricedCall, calls_around, taken
from nnscaler.performance.crowded import simulate_crowded
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.cost.model import AxisPlace, Collective, CostModel
from nnscaler.planning.cost.work import computes_in
from nnscaler.scheduling.registry import schedule_of
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, Timeline, simulate
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan


@dataclass(frozen=True, slots=True)
class StagePrices:
    """Seconds of what one stage does, piece by piece: of one micro-batch, but for `prepare`.

    prepare   by statement, once a step
    forward   by statement
    backward  by statement
    again     by statement, what of it is computed again in backward
    halves    by statement, what of both is for W
    arriving  by message that the stage receives
    back      by message that it sends: the gradient that comes back
    divided   gradients that are divided after each backward
    """

    prepare: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    halves: tuple[StatementHalves, ...]
    arriving: tuple[float, ...]
    back: tuple[float, ...]
    divided: float

    @property
    def ahead(self) -> float:
        """Seconds of F."""
        return sum(self.forward) + sum(self.arriving)

    @property
    def behind(self) -> float:
        """Seconds of B."""
        return sum(self.backward) + sum(self.again) + sum(self.back) + self.divided

    @property
    def weights(self) -> float:
        """Seconds of W, of those of B."""
        pieces = zip(self.halves, self.backward, self.again, strict=True)
        return self.divided + sum(h.gradients * behind + h.again * again for h, behind, again in pieces)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step.

    seconds    of the whole step
    forward    per stage, of one micro-batch
    backward   per stage, of one micro-batch
    weights    per stage, of one micro-batch: the part of `backward` that its second half, W, takes
    once       per stage, gathers of parameters and sums of gradients at the rate of full buckets, and work that all
               micro-batches share
    beside     per stage, its part of the time that the planner's tables leave out on its device: the buckets' own
               latency, sums of the loss, and overheads of every step
    timeline   when each pass runs
    prices     per stage
    around     the calls of parameters at rest and of the loss, by device
    before     per device, seconds until its first pass may start
    after      per device, seconds from the end of its last pass to the end of its step
    share      of the seconds in `prices` and `around` that they take while all ranks compute
    """

    seconds: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    once: tuple[float, ...]
    beside: tuple[float, ...]
    timeline: Timeline
    prices: tuple[StagePrices, ...]
    around: tuple[tuple[PricedCall, ...], ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    share: float


def predict(
    communicated: CommunicatedGraph, order: Schedule, signatures: Mapping[str, Signature], cost: CostModel
) -> Prediction:
    """Predict one step of a program. A message takes its time where it is received: senders do not wait.

    Each device gathers parameters and prepares, runs its order, and sums gradients when it is done with that. Of a
    stream it is for as many batches as its order is written for, with the sums where its updates are.
    """
    graph, programs, ranks = communicated.partitioned.graph, communicated.stages, communicated.partitioned.devices
    cost = cost.among(sum(map(len, ranks)))
    overheads = cost.overheads
    around = calls_around(communicated, ranks, cost)
    prices = tuple(_prices(graph, p, signatures, cost, around[p.stage.devices[0]]) for p in programs)
    forward, backward, weights = (tuple(getattr(p, n) for p in prices) for n in ("ahead", "behind", "weights"))
    before, after = [0.0] * len(ranks), [overheads.step] * len(ranks)
    for price, program in zip(prices, programs, strict=True):
        for device in program.stage.devices:
            before[device] += sum(price.prepare)
    for device, calls in enumerate(around):
        before[device] += taken(calls, ranks[device], "gather")
        summed = 0.0 if order.staleness else taken(calls, ranks[device], "gradient")
        after[device] += summed + taken(calls, ranks[device], "loss")
    updates = [taken(around[p.stage.devices[0]], ranks[p.stage.devices[0]], "gradient") for p in programs]
    sliced = any(program.stage.slices > 1 for program in programs)
    shares = [w.slices for w in stage_work(communicated, signatures) if w.slices] if sliced else []
    of_slices = [[share / max(each) for share in each] for each in shares]
    costs = PassCosts(forward, backward, weights, updates, of_slices)
    if overheads.crowding:
        counts = [len(own) for own in ranks]
        timeline = simulate_crowded(order, communicated.edges, costs, counts, overheads.relief, before)
        share = overheads.relief(sum(counts))
    else:
        timeline, share = simulate(order, communicated.edges, costs, before), 1.0
    once = tuple(_once(graph, p, price, cost) for p, price in zip(programs, prices, strict=True))
    beside = [0.0] * len(programs)
    for device, own in enumerate(map(communicated.on, range(len(ranks)))):
        left = before[device] + after[device]
        for p in own:
            left += p.stage.passes * (prices[p.stage.index].divided - _moved(graph, p, cost, {"B"}))
            left -= once[p.stage.index]
        for p in own:
            beside[p.stage.index] = left / len(own)
    ends = [(row[-1].stop if row else 0.0) + share * left for row, left in zip(timeline.rows, after, strict=True)]
    before, after = [share * seconds for seconds in before], [share * seconds for seconds in after]
    return Prediction(
        max(ends), forward, backward, weights, once, tuple(beside), timeline, prices, around, tuple(before),
        tuple(after), share,
    )  # fmt: skip


def place_of(stage: Stage, axis: str) -> AxisPlace:
    """Return where an axis lies among the ranks of a stage: the last one varies fastest."""
    names = [a.name for a in stage.mesh.axes]
    position = names.index(axis)
    inner = prod(a.size for a in stage.mesh.axes[position + 1 :])
    return AxisPlace(stage.mesh.axes[position].size, inner)


def _prices(
    graph: Graph,
    program: StageProgram,
    signatures: Mapping[str, Signature],
    cost: CostModel,
    around: Iterable[PricedCall],
) -> StagePrices:
    stage = program.stage
    pairs, again = [], []
    repeated = repeated_in_backward(graph, program.forward)
    for i, statement in enumerate(program.forward):
        times = times_of(statement, stage)
        ahead, behind = _statement(graph, stage, statement, signatures, cost)
        pairs.append((ahead * times, behind * times if program.gradient else 0.0))
        if isinstance(statement, Compute):
            again.append((ahead + cost.overheads.again) * times if runs_again(statement) else 0.0)
        else:
            again.append(ahead * times if i in repeated else 0.0)
    return StagePrices(
        tuple(_statement(graph, stage, statement, signatures, cost)[0] for statement in program.prepare),
        tuple(ahead for ahead, _ in pairs),
        tuple(behind for _, behind in pairs),
        tuple(again) if program.gradient else (0.0,) * len(again),
        statement_halves(graph, program),
        tuple(_sent(graph, stage, message, cost) for message in program.receives),
        tuple(_sent(graph, stage, m, cost) if m.needs_grad else 0.0 for m in program.sends),
        taken(around, stage.mesh.ranks, "scatter", stage.index),
    )


def _statement(
    graph: Graph, stage: Stage, statement: Statement, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float]:
    """Return the seconds of a statement, once, forward and backward."""
    if isinstance(statement, Compute):
        return _compute(graph, stage, statement, signatures, cost)
    if isinstance(statement, Convert):
        return _convert(graph, stage, statement, cost)
    return cost.overheads.statement * len(statement.targets), 0.0


def _sent(graph: Graph, stage: Stage, message: Message, cost: CostModel) -> float:
    """Return the seconds in which a message arrives at a stage: the tensor, or its gradient where it was made."""
    tensor, version = graph.tensors[message.tensor], message.target
    if stage.index == message.source_stage:
        version = message.source
    size = prod(local_shape(version.layout, stage.sizes, tensor.shape)) * element_bytes(tensor.dtype)
    return cost.collective("send", size, AxisPlace(2, len(stage.mesh.ranks)))


def _once(graph: Graph, program: StageProgram, price: StagePrices, cost: CostModel) -> float:
    return sum(price.prepare) + _moved(graph, program, cost, {"gather", "gradient"})


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


def _compute(
    graph: Graph, stage: Stage, statement: Compute, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float]:
    outputs = [None if v is None else graph.tensors[v.tensor] for v in statement.outputs]
    inputs = [graph.tensors[v.tensor] for v in statement.inputs]
    layouts = as_computed(statement.circulates, [v.layout for v in statement.inputs])
    shapes_in = [local_shape(x, stage.sizes, t.shape) for x, t in zip(layouts, inputs, strict=True)]
    shapes_out = [
        None if v is None or t is None else local_shape(v.layout, stage.sizes, t.shape)
        for v, t in zip(statement.outputs, outputs, strict=True)
    ]
    dtype = computes_in(t.dtype for t in (*inputs, *outputs) if t is not None)
    signature = signatures[statement.operation.name]
    forward, backward = cost.compute(signature, shapes_in, shapes_out, dtype)
    forward += _rotated(graph, stage, statement, "forward", cost)
    if not any(t is not None and t.needs_grad for t in outputs):
        return forward, 0.0
    return forward, backward + _rotated(graph, stage, statement, "backward", cost)


def _rotated(graph: Graph, stage: Stage, statement: Compute, way: Direction, cost: CostModel) -> float:
    """Return the seconds of the calls inside of an operator, none of which the runtime hides behind computing."""
    operands, total = [graph.tensors[v.tensor] for v in statement.inputs], 0.0
    for turn in rotations(statement.circulates, operands, stage.sizes, way):
        shape = local_shape(statement.inputs[turn.slot].layout, stage.sizes, operands[turn.slot].shape)
        place = place_of(stage, stage.names[turn.axis])
        total += turn.times * cost.collective("send", prod(shape) * element_bytes(turn.dtype), place)
    return total


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


def programmed(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, within: float = inf) -> Programmed:
    """Make the program of a plan, as far as its communication. `within`: bytes of a rank for a schedule that is
    searched.

    Raises NnscalerError for a plan that is not legal for the graph.
    """
    known = dict(signatures)  # `apply_plan` adds those of operations that it makes
    communicated = materialise(apply_plan(graph, known, plan), known)
    ordered = with_orders(plan, communicated, known, within)
    return Programmed(communicated, schedule_of(ordered, communicated.without_gradient), known)


def replay(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, cost: CostModel) -> Replay:
    """Predict one step of a plan. Raises NnscalerError for a plan that is not legal for the graph."""
    program = programmed(graph, signatures, plan)
    communicated, order = program.communicated, program.order
    found = program.predicted(cost)
    working = [sum(span.stop - span.start for span in row) for row in found.timeline.rows]
    for stage, once in zip(communicated.stages, found.once, strict=True):
        for device in stage.stage.devices:
            working[device] += once
    busy = tuple(seconds / found.seconds if found.seconds else 0.0 for seconds in working)
    profile = step_communication(communicated, order)
    sent = [0.0] * plan.devices
    for calls in profile.classes:
        for device in order.devices[calls.call.stage]:
            sent[device] += calls.wire_bytes
    return Replay(plan, communicated, order, found, busy, profile, tuple(sent))
