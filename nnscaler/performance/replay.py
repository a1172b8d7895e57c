"""Replay a plan: its program is made as far as its communication, priced, and its schedule simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.communication.materialise import materialise
from nnscaler.communication.profile import StepCommunication, step_communication
from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature
from nnscaler.performance.predict import Prediction, predict
from nnscaler.planning.cost.model import CostModel
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan


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
    return Programmed(communicated, get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches), known)


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
