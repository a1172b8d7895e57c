"""Cut an operand into the pieces of the ranks of a mesh of one or two axes, as its layout says, and join them.

The layouts of `nnscaler.layout`, cut by what cuts them in generated programs (`nnscaler.runtime.cut_tensors`). Two cuts
of one dim are made from the outermost inwards, with `outer` in local units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from nnscaler.layout import Partial, Prefix, Sharded, State
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.cut_tensors import join_pieces, nested, pieces_of
from verify.evidence.inputs.draw_values import random_terms

Held = Sharded | Prefix | Literal["copy", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Lay:
    """`held` has one entry per axis; `order` is the order in which axes are cut."""

    held: tuple[Held, ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def summed(self) -> bool:
        """Say if ranks, or slices, hold terms of a sum."""
        return any(held == "sum" or (isinstance(held, Prefix) and held.terms) for held in self.held)

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of every rank, row-major."""
        return ranks_of(self.parts)


@lru_cache(maxsize=256)
def ranks_of(parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates of every rank of a mesh, row-major."""
    return tuple(product(*(range(p) for p in parts)))


def groups_of(
    axes: Sequence[str], parts: tuple[int, ...], number: int, communicator: Communicator
) -> dict[str, AxisGroup]:
    """Return the ranks of each axis among which the rank of this number is."""
    ranks = ranks_of(parts)
    own, found = ranks[number], dict[str, AxisGroup]()
    for position, (axis, size) in enumerate(zip(axes, parts, strict=False)):
        members = tuple(ranks.index((*own[:position], i, *own[position + 1 :])) for i in range(size))
        found[axis] = AxisGroup(axis, size, own[position], members, communicator)
    return found


def lay_of(states: Sequence[State], parts: Sequence[int]) -> Lay:
    """Return the layout for `states`, one per axis. Raises ValueError where two axes overlap."""
    held = [_held(state) for state in states]
    for dim in {cut.dim for cut in held if isinstance(cut, Sharded)}:
        here = [(axis, cut) for axis, cut in enumerate(held) if isinstance(cut, Sharded) and cut.dim == dim]
        for position, local in nested([(cut, parts[axis]) for axis, cut in here]) if len(here) > 1 else ():
            held[here[position][0]] = local
    order = sorted(range(len(held)), key=lambda a: s.outer if isinstance(s := states[a], Sharded) else 0)
    return Lay(tuple(held), tuple(parts), tuple(order))


def _held(state: State) -> Held:
    if isinstance(state, Sharded | Prefix):
        return state
    if isinstance(state, Partial):
        return "sum" if state.reduction == "sum" else "max"
    return "copy"


def local_shape(shape: Sequence[int], lay: Lay, rank: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what `rank` holds."""
    local = tuple(shape)
    for held, parts, index in zip(lay.held, lay.parts, rank, strict=True):
        if isinstance(held, Sharded | Prefix):
            local = held.shape_of(local, parts, index)
    return local


def spread(tensor: Tensor, lay: Lay, generator: torch.Generator) -> list[Tensor]:
    """Split a value into the pieces of all ranks, row-major.

    The terms of partial sums are random, uneven and of either sign: zeros on all ranks but one would pass through
    operators that are not linear.
    """
    if len(lay.held) == 1:
        return _cut(tensor, lay.held[0], lay.parts[0], generator)
    found: dict[tuple[tuple[int, int], ...], Tensor] = {(): tensor}
    for axis in lay.order:
        held, parts = lay.held[axis], lay.parts[axis]
        grown: dict[tuple[tuple[int, int], ...], Tensor] = {}
        for at, piece in found.items():
            for rank, part in enumerate(_cut(piece, held, parts, generator)):
                grown[*at, (axis, rank)] = part
        found = grown
    by_rank = {tuple(rank for _, rank in sorted(at)): piece for at, piece in found.items()}
    return [by_rank[rank] for rank in lay.ranks()]


def _cut(tensor: Tensor, held: Held, parts: int, generator: torch.Generator) -> list[Tensor]:
    if isinstance(held, Prefix) and held.terms:  # of a slice's rows it has a term, and each later slice another
        own = pieces_of(tensor, held.own, parts)
        terms = [random_terms(rows, parts - number, generator) for number, rows in enumerate(own)]
        return [torch.cat([terms[j][i - j] for j in range(i + 1)], held.dim) for i in range(parts)]
    if isinstance(held, Sharded | Prefix):
        return pieces_of(tensor, held, parts)
    if held == "sum":
        return random_terms(tensor, parts, generator)
    return [tensor] * parts


def gather(pieces: Sequence[Tensor], lay: Lay, same: Callable[[Tensor, Tensor], bool]) -> Tensor | None:
    """Return the value that the ranks' pieces (row-major) make; None where copies are not the `same`."""
    if len(lay.held) == 1:
        return _combined(pieces, lay.held[0], same)
    found = dict(zip(lay.ranks(), pieces, strict=True))
    axes = list(range(len(lay.parts)))
    for axis in reversed(lay.order):
        position = axes.index(axis)
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for at, piece in found.items():
            groups.setdefault((*at[:position], *at[position + 1 :]), []).append(piece)
        joined: dict[tuple[int, ...], Tensor] = {}
        for at, group in groups.items():
            value = _combined(group, lay.held[axis], same)
            if value is None:
                return None
            joined[at] = value
        found, axes = joined, [a for a in axes if a != axis]
    return found[()]


def _combined(group: Sequence[Tensor], held: Held, same: Callable[[Tensor, Tensor], bool]) -> Tensor | None:
    if isinstance(held, Prefix) and not held.terms:  # earlier slices have of each row what the last one has
        *earlier, last = group
        if not all(same(last.narrow(held.dim, 0, p.shape[held.dim]), p) for p in earlier):
            return None
    if isinstance(held, Sharded | Prefix):
        return join_pieces(group, held)
    total = group[0]
    for piece in group[1:]:
        if held == "sum":
            total = total + piece
        elif held == "max":
            total = torch.maximum(total, piece)
        elif not same(total, piece):
            return None
    return total
