"""The calls inside of operators that pass operands around an axis: rotations of blocks, forward and backward.

Of n ranks, forward rotates each operand n - 1 times, and so does backward, whose gradients go once more to be home.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from nnscaler.communication.communicated_graph import Compute, Version, writes
from nnscaler.ir.graph import Graph, gradient_dtype
from nnscaler.ir.placement import Stage

ROTATE = "rotate"  # the kind of these calls


@dataclass(frozen=True, slots=True)
class Rotation:
    """Equal calls of one operator, in one pass.

    version    the operand whose block, or whose gradient's block, is handed on
    axis       position of the axis
    dtype      of what is handed on: gradients are added up in float32 where operands are of half precision
    times      calls
    """

    version: Version
    axis: int
    dtype: str
    times: int


def rotations(
    graph: Graph, stage: Stage, statement: Compute, direction: Literal["forward", "backward"]
) -> Iterator[Rotation]:
    """Yield the calls that an operator makes in one pass over its statement, once."""
    for axis, slots in statement.circulates:
        size = stage.sizes[axis]
        for slot in slots:
            version = statement.inputs[slot]
            tensor = graph.tensors[version.tensor]
            yield Rotation(version, axis, tensor.dtype, size - 1)
            if direction == "backward" and tensor.needs_grad:
                yield Rotation(version, axis, gradient_dtype(tensor.dtype), size)


def both_ways(graph: Graph, stage: Stage, statement: Compute, differentiated: Collection[str]) -> Iterator[Rotation]:
    """Yield the calls of forward, and those of backward where a result is among the variables with a gradient."""
    yield from rotations(graph, stage, statement, "forward")
    if any(version.variable in differentiated for version in writes(statement)):
        yield from rotations(graph, stage, statement, "backward")
