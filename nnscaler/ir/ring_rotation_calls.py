"""The calls inside of operators that pass operands around an axis: rotations of blocks, forward and backward.

Of n ranks, forward rotates each operand n - 1 times, and so does backward, whose gradients go once more to be home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nnscaler.ir.derive_operand_layouts import circulating_slots
from nnscaler.ir.graph import LogicalTensor, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.layout import INVARIANT, Layout, with_state

ROTATE = "rotate"  # the kind of these calls
Circulates = tuple[tuple[int, tuple[int, ...]], ...]  # (position of an axis, input slots) of what is passed around it
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Equal calls of one operator, in one pass.

    slot     of the operand whose block, or whose gradient's block, is handed on
    axis     position of the axis
    dtype    of what is handed on: gradients are added up in float32 where operands are of half precision
    times    calls
    """

    slot: int
    axis: int
    dtype: str
    times: int


def circulation(signature: Signature, choices: Sequence[Choice]) -> Circulates:
    """Return what an operation passes around under these choices, one per axis."""
    slots = (circulating_slots(signature, choice) for choice in choices)
    return tuple((axis, found) for axis, found in enumerate(slots) if found)


def rotations(
    circulates: Circulates, operands: Sequence[LogicalTensor], sizes: Sequence[int], direction: Direction
) -> Iterator[Rotation]:
    """Yield the calls of one pass. `operands`: by slot; `sizes`: of the axes."""
    for axis, slots in circulates:
        for slot in slots:
            tensor = operands[slot]
            yield Rotation(slot, axis, tensor.dtype, sizes[axis] - 1)
            if direction == "backward" and tensor.needs_grad:
                yield Rotation(slot, axis, gradient_dtype(tensor.dtype), sizes[axis])


def as_computed(circulates: Circulates, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts of all that comes by: what goes around an axis is computed with whole, a block at a time."""
    found = list(layouts)
    for axis, slots in circulates:
        for slot in slots:
            found[slot] = with_state(found[slot], axis, INVARIANT)
    return found
