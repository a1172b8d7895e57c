"""Predict the time of a step of a program by a cost model: its statements priced one by one, its schedule replayed.

The planner prices choices; this prices the program that came of them, with the conversions that it really has, so that
the two can be compared, and any plan can be given a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from nnscaler.communication.communicated_graph import CommunicatedGraph, StageProgram
from nnscaler.communication.communication_volume import StepCommunication, step_communication
from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.parameter_layouts import RestMove, RestPhase, moves_of
from nnscaler.communication.search_pass_order import with_orders
from nnscaler.communication.stage_memory_and_work import stage_work
from nnscaler.instructions import Instruction, StageEdge
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Stage
from nnscaler.performance.stage_prices import (
    PricedCall,
    StagePrices,
    calls_around,
    divided_parameters,
    last_of,
    place_of,
    stage_prices,
    taken,
)
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.scheduling.dependencies import check_acyclic, dependencies
from nnscaler.scheduling.registry import schedule_of
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, Span, Timeline, simulate, timeline_of
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan


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
    hidden     per device, seconds of its gradient sums that lie under its last backwards
    halved     how many times longer a backward takes in two halves
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
    hidden: tuple[float, ...]
    halved: float


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
    prices = tuple(stage_prices(graph, p, signatures, cost, around[p.stage.devices[0]]) for p in programs)
    forward, backward, weights = (tuple(getattr(p, n) for p in prices) for n in ("ahead", "behind", "weights"))
    before, after = [0.0] * len(ranks), [overheads.step] * len(ranks)
    for price, program in zip(prices, programs, strict=True):
        for device in program.stage.devices:
            before[device] += sum(price.prepare) + overheads.moved * divided_parameters(graph, program, "gather")
            after[device] += overheads.moved * divided_parameters(graph, program, "gradient")
    hidden = [0.0] * len(ranks)
    for device, calls in enumerate(around):
        before[device] += taken(calls, ranks[device], "gather")
        after[device] += taken(calls, ranks[device], "loss")
        if not order.staleness:
            summed = taken(calls, ranks[device], "gradient")
            computed = sum(prices[p.stage.index].computed for p in communicated.on(device))
            exposed = overheads.exposed(summed, last_of(calls, "gradient"), computed)
            hidden[device] = summed - exposed
            after[device] += exposed
    updates = [taken(around[p.stage.devices[0]], ranks[p.stage.devices[0]], "gradient") for p in programs]
    sliced = any(program.stage.slices > 1 for program in programs)
    shares = [w.slices for w in stage_work(communicated, signatures) if w.slices] if sliced else []
    of_slices = [[share / max(each) for share in each] for each in shares]
    costs = PassCosts(forward, backward, weights, updates, of_slices, overheads.halved)
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
            price = prices[p.stage.index]
            left += p.stage.passes * (price.divided + price.added - _moved(graph, p, cost, {"B"}))
            left -= once[p.stage.index]
        for p in own:
            beside[p.stage.index] = left / len(own)
    ends = [(row[-1].stop if row else 0.0) + share * left for row, left in zip(timeline.rows, after, strict=True)]
    before, after, hidden = ([share * seconds for seconds in figures] for figures in (before, after, hidden))
    return Prediction(
        max(ends), forward, backward, weights, once, tuple(beside), timeline, prices, around, tuple(before),
        tuple(after), share, tuple(hidden), overheads.halved,
    )  # fmt: skip


def _once(graph: Graph, program: StageProgram, price: StagePrices, cost: CostModel) -> float:
    return sum(price.prepare) + _moved(graph, program, cost, {"gather", "gradient"})


def _moved(graph: Graph, program: StageProgram, cost: CostModel, phases: Collection[RestPhase]) -> float:
    """Return the seconds in which parameters go between rest and their leaves in one of these phases, at the rate of
    full buckets."""
    stage, moved = program.stage, cost.overheads.moved
    return sum(
        _rate(stage, move, cost) * move.bytes(stage, graph.tensors[stored.tensor].shape)
        + (moved if move.kind != "all_reduce" else 0.0)
        for stored, move in moves_of(graph, program)
        if move.phase in phases
    )


def _rate(stage: Stage, move: RestMove, cost: CostModel) -> float:
    return sum(seconds_per_byte(cost, place_of(stage, axis), move.kind) for axis in move.axes)


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


def simulate_crowded(
    schedule: Schedule,
    edges: Collection[StageEdge],
    costs: PassCosts,
    ranks: Sequence[int],
    relief: Callable[[int], float],
    before: Sequence[float] | None = None,
) -> Timeline:
    """Simulate as `timeline.simulate`, with costs per stage that hold while every rank computes.

    `ranks`: of each device; `relief(n)`: the share of its cost that an instruction takes while n ranks compute. A
    device that waits computes nothing. `before`: cost of what each device does before its first instruction.
    """
    check_acyclic(schedule, edges)
    waits = dependencies(schedule, edges)
    position = [0] * len(schedule.orders)
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    finished: set[Instruction] = set()
    # device: what, since when, cost that is left
    running: dict[int, tuple[Instruction | None, float, float]] = {
        device: (None, 0.0, cost) for device, cost in enumerate(before or ()) if cost
    }
    now = 0.0
    while True:
        for device, order in enumerate(schedule.orders):
            if device in running or position[device] == len(order):
                continue
            instruction = order[position[device]]
            together = schedule.devices[instruction.stage]
            there = all(d not in running and schedule.orders[d][position[d] :][:1] == (instruction,) for d in together)
            if there and all(w in finished for w in waits[instruction]):
                running.update(dict.fromkeys(together, (instruction, now, costs.of(instruction))))
        if not running:
            return timeline_of(schedule, rows)
        share = relief(sum(ranks[device] for device in running))
        passed = min(left for _, _, left in running.values())
        now += passed * share
        for device, (run, start, left) in list(running.items()):
            if left <= passed:
                if run is not None:
                    rows[device].append(Span(run, start, now))
                    finished.add(run)
                    position[device] += 1
                del running[device]
            else:
                running[device] = run, start, left - passed
