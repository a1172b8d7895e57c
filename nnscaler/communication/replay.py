"""A plan replayed: its program is made as far as its communication, priced, and its schedule simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.communication.communicated import CommunicatedGraph
from nnscaler.communication.materialise import materialise
from nnscaler.communication.predict import Prediction, predict
from nnscaler.ir.graph import Graph
from nnscaler.planning.cost.model import CostModel
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan
from nnscaler.transform.signature import Signature


@dataclass(frozen=True)
class Replay:
    """What the program of a plan does in a step, by a cost model. `busy`: per pipeline device, the share of the step in
    which it computes or communicates."""

    plan: Plan
    communicated: CommunicatedGraph
    order: Schedule
    prediction: Prediction
    busy: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.prediction.seconds


def replay(graph: Graph, signatures: Mapping[str, Signature], plan: Plan, cost: CostModel) -> Replay:
    """Raises NnscalerError for a plan that is not legal for the graph."""
    known = dict(signatures)  # `apply_plan` adds those of operations that it makes
    communicated = materialise(apply_plan(graph, known, plan), known)
    order = get_schedule(plan.schedule)(plan.devices, plan.chunks, plan.micro_batches)
    found = predict(communicated, order, known, cost)
    working = [sum(span.stop - span.start for span in row) for row in found.timeline.rows]
    for program, once in zip(communicated.stages, found.once, strict=True):
        working[program.stage.device] += once
    busy = tuple(seconds / found.seconds if found.seconds else 0.0 for seconds in working)
    return Replay(plan, communicated, order, found, busy)
