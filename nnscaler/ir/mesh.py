"""Device meshes: an n-d array of ranks with named axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

MICRO = "micro"  # micro-batches are a mesh axis in time; it has no ranks of its own


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """`ranks` in row-major order over `axes`: the last axis varies fastest.

    Invariant: the product of the axis sizes is the number of ranks, and ranks are distinct.
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert prod(a.size for a in self.axes) == len(self.ranks), (self.axes, self.ranks)
        assert len(set(self.ranks)) == len(self.ranks), self.ranks

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    def same_shape(self, other: DeviceMesh) -> bool:
        return self.axes == other.axes

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """Return the rank's coordinate on each axis. Raises ValueError if the rank is not in the mesh."""
        position = self.ranks.index(rank)
        result: dict[str, int] = {}
        for axis in reversed(self.axes):
            result[axis.name] = position % axis.size
            position //= axis.size
        return {a.name: result[a.name] for a in self.axes}
