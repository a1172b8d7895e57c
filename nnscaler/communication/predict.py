"""What a step of a program takes, by a cost model: its statements priced one by one, its schedule replayed.

The planner prices choices; this prices the program that came of them, with the conversions that it really has, so that
the two can be compared, and any plan can be given a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

from nnscaler.communication.communicated import CommunicatedGraph, Compute, Convert, StageProgram
from nnscaler.communication.recomputed import repeated_in_backward
from nnscaler.ir.dtype import element_bytes, gradient_dtype
from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import full_along, local_shape
from nnscaler.ir.mesh import MICRO
from nnscaler.ir.placement import Stage
from nnscaler.planning.cost.gradients import seconds_per_byte
from nnscaler.planning.cost.model import AxisPlace, Collective, CostModel
from nnscaler.planning.cost.work import computes_in
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import Timeline, simulate
from nnscaler.transform.signature import Signature


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step. `forward`, `backward`: of one micro-batch, per stage; `once`: per stage, sums of gradients and
    what all micro-batches share."""

    seconds: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    once: tuple[float, ...]
    timeline: Timeline


def predict(
    communicated: CommunicatedGraph, order: Schedule, signatures: Mapping[str, Signature], cost: CostModel
) -> Prediction:
    """The step of a program with this schedule. Sending takes time on both sides."""
    graph = communicated.partitioned.graph
    found = [_stage(graph, program, signatures, cost) for program in communicated.stages]
    forward, backward, once = (tuple(values) for values in zip(*found, strict=True))
    timeline = simulate(order, communicated.edges, forward, backward)
    return Prediction(timeline.makespan + max(once), forward, backward, once, timeline)


def place_of(stage: Stage, axis: str) -> AxisPlace:
    """Where an axis lies among the ranks of a stage: the last one varies fastest."""
    names = [a.name for a in stage.mesh.axes]
    position = names.index(axis)
    inner = prod(a.size for a in stage.mesh.axes[position + 1 :])
    return AxisPlace(stage.mesh.axes[position].size, inner)


def _stage(
    graph: Graph, program: StageProgram, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float, float]:
    stage = program.stage
    forward = backward = 0.0
    again = repeated_in_backward(graph, program.forward)
    for i, statement in enumerate(program.forward):
        if isinstance(statement, Compute):
            ahead, behind = _compute(graph, stage, statement, signatures, cost)
            forward += ahead
            backward += behind + (ahead if statement.placement.recompute is not None else 0.0)
        else:
            ahead, behind = _convert(graph, stage, statement, cost)
            forward += ahead
            backward += behind + (ahead if i in again else 0.0)
    for message in (*program.receives, *program.sends):
        tensor = graph.tensors[message.tensor]
        size = prod(local_shape(message.target.layout, stage.sizes, tensor.shape)) * element_bytes(tensor.dtype)
        sent = cost.collective("send", size, AxisPlace(2, len(stage.mesh.ranks)))
        forward += sent
        backward += sent if message.needs_grad else 0.0
    once = 0.0
    for statement in program.prepare:
        one = _compute(graph, stage, statement, signatures, cost) if isinstance(statement, Compute) else (0.0, 0.0)
        once += one[0]
    for stored in program.stored:
        tensor = graph.tensors[stored.tensor]
        if tensor.role == "parameter" and tensor.needs_grad:
            elements = prod(local_shape(stored.at_rest, stage.sizes, tensor.shape))
            size = elements * element_bytes(gradient_dtype(tensor.dtype))
            for axis in stored.reduce:
                once += seconds_per_byte(cost, place_of(stage, axis)) * size
    return forward, backward, once


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
    if name == MICRO:
        return 0.0, 0.0
    size = prod(full_along(move.source, stage.sizes, tensor.shape, move.axis)) * element_bytes(tensor.dtype)

    def seconds(kind: str | None) -> float:
        return 0.0 if kind is None else cost.collective(cast(Collective, kind), size, place_of(stage, name))

    return seconds(move.row.forward), seconds(move.row.backward) if tensor.needs_grad else 0.0
