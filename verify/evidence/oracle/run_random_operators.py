"""Run operators that draw random numbers as generated programs do: numbers are drawn by logical coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnscaler.ir import layout as ir_layout
from nnscaler.runtime.layout import Invariant, Partial, Prefix, Replicated, Sharded, State
from nnscaler.runtime.role import RunContext


@dataclass(frozen=True)
class MeshPlace:
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
        case ir_layout.Prefix(dim, sizes, terms):
            return Prefix(dim, sizes, terms)
        case ir_layout.Replicated():
            return Replicated()
    return Invariant()


def random_arguments(
    shape: tuple[int, ...], axes: Mapping[str, int], rank: Mapping[str, int], states: Mapping[str, ir_layout.State]
) -> dict[str, Any]:
    """Return the arguments that the compiler adds to a random operator's call, for one rank.

    shape   of the logical tensor that says where the numbers lie: the first input, or the output where there is none
    axes    axis -> ranks along it
    rank    axis -> the rank's place
    states  axis -> how that tensor lies along it
    """
    held = {axis: runtime_state(state) for axis, state in states.items()}
    return {"stage": MeshPlace(axes, rank, RunContext()), "name": "operation", "states": held, "logical_shape": shape}


def whole_arguments(shape: Sequence[int]) -> dict[str, Any]:
    """The same for the whole operator, on one rank."""
    return random_arguments(tuple(shape), {}, {}, {})
