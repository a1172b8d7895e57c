"""How much a program communicates: calls and elements per step, per axis and collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from nnscaler.communication.communicated import Convert, StageProgram
from nnscaler.ir.conversion import volume
from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import full_along, local_shape


def volumes(graph: Graph, programs: Iterable[StageProgram]) -> Mapping[tuple[str, str], tuple[int, float]]:
    """(axis, collective) -> (calls, elements sent by one rank) in one step, forward and backward, inline ones and
    the reductions of parameters' gradients."""
    found: dict[tuple[str, str], tuple[int, float]] = {}

    def add(axis: str, collective: str | None, elements: int, parts: int, times: int) -> None:
        if collective is None or parts == 1:
            return
        calls, sent = found.get((axis, collective), (0, 0.0))
        found[axis, collective] = (calls + times, sent + times * volume(collective, elements, parts))

    for program in programs:
        sizes, names = program.stage.sizes, program.stage.names
        for statements, times in ((program.prepare, 1), (program.forward, program.stage.micro_batches)):
            for statement in statements:
                if not isinstance(statement, Convert):
                    continue
                move, tensor = statement.move, graph.tensors[statement.source.tensor]
                full = full_along(move.source, sizes, tensor.shape, move.axis)
                add(names[move.axis], move.row.forward, prod(full), sizes[move.axis], times)
                if tensor.needs_grad:
                    add(names[move.axis], move.row.backward, prod(full), sizes[move.axis], times)
        for stored in program.stored:
            elements = prod(local_shape(stored.at_rest, sizes, graph.tensors[stored.tensor].shape))
            for axis in stored.reduce:
                add(axis, "all_reduce", elements, sizes[names.index(axis)], 1)
        for message in program.receives:
            elements = prod(local_shape(message.target.layout, sizes, graph.tensors[message.tensor].shape))
            calls, sent = found.get(("pp", "send"), (0, 0.0))
            times = program.stage.micro_batches * (2 if message.needs_grad else 1)
            found["pp", "send"] = (calls + times, sent + float(times * elements))
    return found
