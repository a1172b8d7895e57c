"""List the communication between a parameter at rest and its leaf, which no line of the program shows.

Under ZeRO-1 and 2 the leaf is gathered from the tensors at rest before the first forward, and its gradient is summed
and divided like them, after the last backward or after each one. What is still a partial sum then is summed once a
step. The communication profile, the volumes and the predicted times of a program are made from these moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from nnscaler.communication.communicated_graph import StageProgram, Stored
from nnscaler.ir.graph import Graph, element_bytes, gradient_dtype
from nnscaler.ir.placement import Stage
from nnscaler.layout import Layout, local_shape

RestPhase = Literal["gather", "B", "gradient"]


@dataclass(frozen=True, slots=True)
class RestMove:
    """One collective of one parameter.

    kind    all_gather of values; reduce_scatter or all_reduce of gradients
    phase   "gather": before the first forward; "B": after each backward; "gradient": after the last one
    axes    over which, of the stage's mesh
    whole   layout of what all ranks of a group have after a gather, and before a sum
    part    layout of what each has before a gather, and after a sum
    dtype   in which it travels
    depth   the number of axes that divide `whole` between steps; runs of one depth share buckets
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    phase: RestPhase
    axes: tuple[str, ...]
    whole: Layout
    part: Layout
    dtype: str
    depth: int

    def bytes(self, stage: Stage, shape: tuple[int, ...]) -> int:
        """Return the bytes of the whole on a rank, for a parameter of this logical shape; on the rank that has most."""
        return prod(local_shape(self.whole, stage.sizes, shape)) * element_bytes(self.dtype)

    def times(self, stage: Stage) -> int:
        """Return how often a step makes it."""
        return stage.passes if self.phase == "B" else 1


def rest_moves(graph: Graph, program: StageProgram, stored: Stored) -> Iterator[RestMove]:
    """Yield the moves of a stored tensor, gathers first; none for one that rests as it is read and gets no gradient."""
    tensor, names = graph.tensors[stored.tensor], program.stage.names
    divisions: list[tuple[str, Layout, Layout]] = []
    layout = stored.leaf
    for position in stored.rest:
        part = (*layout[:position], stored.at_rest[position], *layout[position + 1 :])
        divisions.append((names[position], layout, part))
        layout = part
    for depth, (axis, whole, part) in reversed(list(enumerate(divisions))):
        yield RestMove("all_gather", "gather", (axis,), whole, part, tensor.dtype, depth)
    if tensor.role != "parameter" or not tensor.needs_grad or not graph.consumers[stored.tensor]:
        return
    dtype = tensor.sums or gradient_dtype(tensor.dtype)
    at_once = bool(divisions) and stored.scatter == "micro_batch" and program.gradient
    for depth, (axis, whole, part) in enumerate(divisions):
        if axis in stored.reduce:
            yield RestMove("reduce_scatter", "B" if at_once else "gradient", (axis,), whole, part, dtype, depth)
    summed = stored.summed(names)
    if summed or len(stored.copies) > 1:  # `axes` are those of this stage; the other ones that hold it take part
        wide = gradient_dtype(dtype) if at_once else dtype  # shards are added up over micro-batches
        yield RestMove("all_reduce", "gradient", summed, layout, layout, wide, len(divisions))


def moves_of(graph: Graph, program: StageProgram) -> Iterator[tuple[Stored, RestMove]]:
    """Yield the moves of all stored tensors of a stage."""
    for stored in program.stored:
        for move in rest_moves(graph, program, stored):
            yield stored, move
