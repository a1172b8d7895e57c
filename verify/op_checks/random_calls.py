"""Run operators that draw random numbers as generated programs do: numbers are drawn by logical coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnscaler.ir import layout as ir_layout
from nnscaler.runtime.layout import Invariant, Partial, Replicated, Sharded, State
from nnscaler.runtime.role import RunContext

if TYPE_CHECKING:
    from verify.op_checks.partition import Partition


@dataclass(frozen=True)
class Place:
    """A stand-in for the stage that the runtime's random operators ask for their rank's place on the mesh."""

    axes: Mapping[str, int]
    at: Mapping[str, int]
    context: RunContext
    device: str = "cpu"

    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    def coordinates(self) -> dict[str, int]:
        return dict(self.at)


def runtime_state(state: ir_layout.State) -> State:
    """Return the compiler's state as the runtime's."""
    match state:
        case ir_layout.Sharded(dim, outer, sections, sizes):
            return Sharded(dim, outer, sections, sizes)
        case ir_layout.Partial(reduction):
            return Partial(reduction)
        case ir_layout.Replicated():
            return Replicated()
    return Invariant()


def random_arguments(partition: Partition, rank: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that the compiler adds to a random operator's call, for one rank."""
    from verify.op_checks.partition import AXES

    tensors = partition.signature.call.tensors()
    shape = tensors[0].shape if tensors else next(o.shape for o in partition.signature.call.outputs if o is not None)
    states = partition.states_in[0] if tensors else partition.states_out[0]
    names = AXES[: len(partition.parts)]
    place = Place(dict(zip(names, partition.parts, strict=True)), dict(zip(names, rank, strict=True)), RunContext())
    held = {axis: runtime_state(s) for axis, s in zip(names, states, strict=True)}
    return {"stage": place, "name": "operation", "states": held, "logical_shape": shape}


def whole_arguments(shape: Sequence[int]) -> dict[str, Any]:
    """Return the same for the whole operator, on one rank."""
    return {"stage": Place({}, {}, RunContext()), "name": "operation", "states": {}, "logical_shape": tuple(shape)}
