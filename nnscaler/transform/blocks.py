"""Modules as places to cut a pipeline, for models whose layers have no numbers.

A place between two operations lies inside of every module that both run in: a cut there goes through these modules. Few
open modules make a good place, since little but the result of a module crosses its border, and since people know the
modules of their model by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nnscaler.ir.graph import Operation

ENOUGH = 16  # blocks of a model, so that two or three stages made of them can be even


@dataclass(frozen=True, slots=True)
class Block:
    """Operations between two places at which the planner may cut.

    name        the outermost module that runs in it and nowhere else; else that of its first operation
    operations  names, in order
    """

    name: str
    operations: tuple[str, ...]


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


def outermost(depths: Sequence[int], places: Collection[int], least: int) -> tuple[int, ...]:
    """Return the places at which the fewest modules are open: so many levels of modules that there are `least` places,
    or all where there are fewer."""
    for depth in sorted({depths[place] for place in places}):
        found = tuple(sorted(place for place in places if depths[place] <= depth))
        if len(found) >= least:
            return found
    return tuple(sorted(places))


def blocks_of(operations: Sequence[Operation], forbidden: Collection[int]) -> tuple[Block, ...]:
    """Cut the operations at the borders of the outermost modules that give `ENOUGH` blocks, or else anywhere.

    There is no cut at a `forbidden` place. A model of one block has no place to be cut.
    """
    places = [place for place in range(1, len(operations)) if place not in forbidden]
    edges = [0, *outermost(open_modules(operations), places, ENOUGH - 1), len(operations)]
    parts = [operations[start:end] for start, end in pairwise(edges)] if operations else []
    return tuple(Block(describe_modules(part, operations), tuple(op.name for op in part)) for part in parts)


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
