"""Groups of ranks and sizes of elements: the units of a program's communication profile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

from nnscaler.ir.graph import element_bytes
from nnscaler.ir.layout import DeviceMesh, Layout, is_uneven, local_shape
from nnscaler.ir.placement import Stage

Ranks = tuple[int, ...]


@lru_cache(maxsize=1024)
def groups_over(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[Ranks, ...]:
    """Return the groups of ranks of a mesh that differ on these axes only, each in the order of the mesh."""
    outside = [[0] if a.name in axes else range(a.size) for a in mesh.axes]
    inside = [range(a.size) if a.name in axes else [0] for a in mesh.axes]

    def rank(first: Sequence[int], more: Sequence[int]) -> int:
        return mesh.ranks[_ravel([x + y for x, y in zip(first, more, strict=True)], mesh.sizes)]

    return tuple(tuple(rank(first, more) for more in product(*inside)) for first in product(*outside))


def by_bytes(
    members: Sequence[Ranks], stage: Stage, layout: Layout, shape: Sequence[int], dtype: str
) -> dict[int, tuple[Ranks, ...]]:
    """Return the groups by the bytes that a rank of them has of a tensor; by those of the largest shard in a group."""
    if not is_uneven(layout):
        return {prod(local_shape(layout, stage.sizes, shape)) * element_bytes(dtype): tuple(members)}
    found: dict[int, list[Ranks]] = {}
    for group in members:
        size = max(bytes_on(rank, stage, layout, shape, dtype) for rank in group if rank in stage.mesh.ranks)
        found.setdefault(size, []).append(group)
    return {size: tuple(groups) for size, groups in found.items()}


def bytes_on(rank: int, stage: Stage, layout: Layout, shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of the shard of one rank."""
    at = (*stage.mesh.coordinates(rank).values(), 0)
    return prod(local_shape(layout, stage.sizes, shape, at)) * element_bytes(dtype)


def _ravel(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    position = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        position = position * size + coordinate
    return position


def ranks_text(ranks: Collection[int]) -> str:
    """`0-3`, `0, 8, 16`, `0-504 by 8`; ranks in another order than ascending are listed."""
    listed = list(ranks)
    steps = {b - a for a, b in pairwise(listed)}
    if len(listed) > 2 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{listed[0]}-{listed[-1]}" + (f" by {step}" if step > 1 else "")
    if len(listed) == 2 and listed[1] == listed[0] + 1:
        return f"{listed[0]}-{listed[1]}"
    return ", ".join(map(str, listed))
