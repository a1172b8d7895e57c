"""Run operators that draw random numbers as generated programs do: numbers are drawn by logical coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnscaler.layout import State
from nnscaler.runtime.stage_base_class import RunContext


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


def random_arguments(
    shape: tuple[int, ...], axes: Mapping[str, int], rank: Mapping[str, int], states: Mapping[str, State]
) -> dict[str, Any]:
    """Return the arguments that the compiler adds to a random operator's call, for one rank.

    shape   of the logical tensor that says where the numbers lie: the first input, or the output where there is none
    axes    axis -> ranks along it
    rank    axis -> the rank's place
    states  axis -> how that tensor lies along it
    """
    return {"stage": MeshPlace(axes, rank, RunContext()), "name": "operation", "states": states, "logical_shape": shape}


def whole_arguments(shape: Sequence[int]) -> dict[str, Any]:
    """The same for the whole operator, on one rank."""
    return random_arguments(tuple(shape), {}, {}, {})
