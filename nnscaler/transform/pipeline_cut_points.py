"""Modules as places to cut a pipeline, for models whose layers have no numbers.

A place between two operations lies inside of every module that both run in: a cut there goes through these modules. Few
open modules make a good place, since little but the result of a module crosses its border, and since people know the
modules of their model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nnscaler.ir.graph import Operation

INSIDE = 0.05  # of its bytes that a cut counts more for each module that it goes through
ENOUGH = 32  # blocks of equal cost from which some stages can be made that are nearly even


@dataclass(frozen=True, slots=True)
class Block:
    """Operations between two places at which the planner may cut.

    weight      of the bytes that a cut before the block sends, see `weight_of`
    operations  names, in order
    """

    weight: float
    operations: tuple[str, ...]


def weight_of(depth: int) -> float:
    """Return how often the bytes count that a cut through `depth` modules sends."""
    return 1 + INSIDE * depth


def open_modules(operations: Sequence[Operation]) -> list[int]:
    """Return, per place (place i lies before operation i), the number of modules that a cut there goes through."""
    paths = [op.module.split(".") if op.module else [] for op in operations]
    return [0, *(_shared(before, after) for before, after in pairwise(paths)), 0]


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the common start of two module paths."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def outermost(depths: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """Return those of the places at which the fewest modules are open."""
    fewest = min(depths[place] for place in places)
    return tuple(place for place in places if depths[place] == fewest)


def blocks_of(
    operations: Sequence[Operation], forbidden: Collection[int], cost: Callable[[Operation], float]
) -> tuple[Block, ...]:
    """Cut the operations at the borders of modules into blocks none of which has more than 1 / `ENOUGH` of the cost,
    where single operations allow that.

    A part that has more is cut at all places where the fewest modules are open, and its parts again. There is no cut at
    a `forbidden` place.
    """
    depths = open_modules(operations)
    total = list(accumulate(map(cost, operations), initial=0.0))
    edges, waiting = {0, len(operations)}, [(0, len(operations))]
    while waiting:
        start, end = waiting.pop()
        places = [place for place in range(start + 1, end) if place not in forbidden]
        if places and (total[end] - total[start]) * ENOUGH > total[-1]:
            found = outermost(depths, places)
            edges.update(found)
            waiting += pairwise([start, *found, end])
    cut = pairwise(sorted(edges))
    return tuple(Block(weight_of(depths[start]), tuple(op.name for op in operations[start:end])) for start, end in cut)


def describe_modules(part: Sequence[Operation], operations: Sequence[Operation]) -> str:
    """`stem .. block2 (part)`: the first and the last of the outermost modules that lie whole in a part of all
    `operations`; ` (part)` marks a module that does not. Outside of modules, the names of operations."""
    names = {op.name for op in part}
    crossing = {module for op in operations if op.name not in names for module in _around(op)}
    ends = []
    for op in (part[0], part[-1]):
        whole = [module for module in _around(op) if module not in crossing]
        ends.append(whole[0] if whole else f"{op.module} (part)" if op.module else op.name)
    first, last = ends
    return first if first == last else f"{first} .. {last}"


def _around(op: Operation) -> list[str]:
    """Return the modules that an operation runs in, outermost first."""
    parts = op.module.split(".") if op.module else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
