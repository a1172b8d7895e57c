"""The layout of one operand on a mesh of one or two axes: cut a tensor into the ranks' pieces, and join them.

The same layouts as `nnscaler.ir.layout`, made fast for small tensors, and with uneven shards: a dim is viewed as
(outer, length, inner), and a rank holds a range of `length`. Two cuts of one dim are made from the outermost inwards,
with `outer` in local units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Literal

import torch
from torch import Tensor

from nnscaler.ir.layout import Partial, Sharded, State
from verify.evidence.inputs.values import random_terms


@dataclass(frozen=True, slots=True)
class UnevenCut:
    """`bounds` are the ends of the ranks' ranges of `length`; with `sections`, each section is cut by itself."""

    dim: int
    outer: int
    length: int
    bounds: tuple[int, ...]
    sections: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.bounds)


Held = UnevenCut | Literal["copy", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Lay:
    """`held` has one entry per axis; `order` is the order in which axes are cut."""

    held: tuple[Held, ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the coordinates of every rank, row-major."""
        return ranks_of(self.parts)


@lru_cache(maxsize=256)
def ranks_of(parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates of every rank of a mesh, row-major."""
    return tuple(product(*(range(p) for p in parts)))


def lay_of(states: Sequence[State], parts: Sequence[int]) -> Lay:
    """Return the layout for `states`, one per axis."""
    held: list[Held] = []
    for axis, state in enumerate(states):
        if isinstance(state, Sharded):
            inside = prod(
                parts[other]
                for other, s in enumerate(states)
                if other != axis and isinstance(s, Sharded) and s.dim == state.dim and s.outer < state.outer
            )
            ends = tuple(accumulate(state.sizes)) or tuple(range(1, parts[axis] + 1))
            held.append(UnevenCut(state.dim, state.outer // inside, ends[-1], ends, state.sections))
        elif isinstance(state, Partial):
            held.append("sum" if state.reduction == "sum" else "max")
        else:
            held.append("copy")
    order = sorted(range(len(held)), key=lambda a: s.outer if isinstance(s := states[a], Sharded) else 0)
    return Lay(tuple(held), tuple(parts), tuple(order))


def take(tensor: Tensor, cut: UnevenCut, rank: int) -> Tensor:
    """Return the piece of `rank`; a view where possible."""
    start, end = (cut.bounds[rank - 1] if rank else 0), cut.bounds[rank]
    if cut.sections:
        plain = UnevenCut(cut.dim, 1, cut.length, cut.bounds)
        return torch.cat([take(piece, plain, rank) for piece in tensor.split(list(cut.sections), cut.dim)], cut.dim)
    size = tensor.shape[cut.dim]
    inner = size // (cut.outer * cut.length)
    if cut.outer == 1:
        return tensor.narrow(cut.dim, start * inner, (end - start) * inner)
    shape = tuple(tensor.shape)
    view = tensor.reshape(*shape[: cut.dim], cut.outer, cut.length, inner, *shape[cut.dim + 1 :])
    piece = view.narrow(cut.dim + 1, start, end - start)
    return piece.reshape(*shape[: cut.dim], cut.outer * (end - start) * inner, *shape[cut.dim + 1 :])


def join(pieces: Sequence[Tensor], cut: UnevenCut) -> Tensor:
    """Join the ranks' pieces: the inverse of `take`."""
    if cut.sections:
        plain = UnevenCut(cut.dim, 1, cut.length, cut.bounds)
        local = [[s // cut.parts for s in cut.sections]] * len(pieces)
        columns = [piece.split(sizes, cut.dim) for piece, sizes in zip(pieces, local, strict=True)]
        return torch.cat([join([c[i] for c in columns], plain) for i in range(len(cut.sections))], cut.dim)
    if cut.outer == 1:
        return torch.cat(list(pieces), cut.dim)
    shape = tuple(pieces[0].shape)
    spans = [end - start for start, end in zip((0, *cut.bounds), cut.bounds, strict=False)]
    inner = shape[cut.dim] // (cut.outer * spans[0])
    views = [
        piece.reshape(*shape[: cut.dim], cut.outer, span, inner, *shape[cut.dim + 1 :])
        for piece, span in zip(pieces, spans, strict=True)
    ]
    whole = torch.cat(views, cut.dim + 1)
    return whole.reshape(*shape[: cut.dim], cut.outer * cut.length * inner, *shape[cut.dim + 1 :])


def local_shape(shape: Sequence[int], lay: Lay, rank: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what `rank` holds."""
    local = list(shape)
    for axis, held in enumerate(lay.held):
        if isinstance(held, UnevenCut):
            start = held.bounds[rank[axis] - 1] if rank[axis] else 0
            local[held.dim] = local[held.dim] // held.length * (held.bounds[rank[axis]] - start)
    return tuple(local)


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
    if isinstance(held, UnevenCut):
        return [take(tensor, held, rank) for rank in range(parts)]
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
    if isinstance(held, UnevenCut):
        return join(group, held)
    total = group[0]
    for piece in group[1:]:
        if held == "sum":
            total = total + piece
        elif held == "max":
            total = torch.maximum(total, piece)
        elif not same(total, piece):
            return None
    return total
