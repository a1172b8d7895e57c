"""Join the tensors of ranks by logical indices: each element has its owners, and all of them the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.shards import logical_coordinates
from nnscaler.runtime.tensor_bits import distance_of_copies, same_bits
from verify.programs.checks.logical_tensors import UnequalElements
from verify.programs.training.rank_loop import Layout, RankTraining
from verify.results.tolerance import FAMILY_SHARE, FILL, TensorDifference, difference, family_scale

Region = tuple[Any, ...]  # where a piece lies in the logical tensor: slices where it is a block, else indices


@dataclass(frozen=True)
class JoinedTensor:
    """A logical tensor as the ranks hold it.

    value    None where no rank has it, or its pieces do not make it up
    pieces   rank -> local tensor
    regions  rank -> where that lies
    unequal  copies with other bits
    copies   how many were compared
    problem  why the pieces do not make it up
    """

    value: Tensor | None
    pieces: Mapping[int, Tensor] = field(default_factory=dict)
    regions: Mapping[int, Region] = field(default_factory=dict)
    unequal: tuple[UnequalElements, ...] = ()
    copies: int = 0
    problem: str = ""

    def apart(self, expected: Tensor, scale: float) -> dict[int, TensorDifference]:
        """Return how far each rank's piece is from that of the right tensor, relative to all of it: a shard may be
        small. `scale`: that of the family of tensors."""
        whole = max(scale, family_scale([expected], FILL) / FAMILY_SHARE)
        return {rank: difference(piece, expected[self.regions[rank]], whole) for rank, piece in self.pieces.items()}


def indices_of(layout: Layout) -> tuple[Tensor, ...]:
    """Return the indices of a rank's shard in the logical tensor."""
    held = logical_coordinates(layout.shape, layout.states, layout.sizes, layout.coordinates)
    return tuple(torch.meshgrid(*held, indexing="ij")) if held else ()


def region_of(layout: Layout) -> Region:
    """Return the same as slices, where the shard is a block."""
    held = logical_coordinates(layout.shape, layout.states, layout.sizes, layout.coordinates)
    if all(not len(i) or int(i[-1]) - int(i[0]) == len(i) - 1 for i in held):
        return tuple(slice(int(i[0]), int(i[-1]) + 1) if len(i) else slice(0, 0) for i in held)
    return indices_of(layout)


def put_together(name: str, ranks: Sequence[RankTraining], found: Mapping[int, Tensor | None]) -> JoinedTensor:
    """Return the logical tensor of a parameter or buffer, or of what is laid out like it. `found`: by rank."""
    layouts = {r.rank: layout for r in ranks if (layout := r.layout(name)) is not None}
    pieces = {rank: piece for rank in layouts if (piece := found.get(rank)) is not None}
    if not pieces:
        return JoinedTensor(None)
    absent = [rank for rank in layouts if rank not in pieces]
    if absent:
        problem = f"rank {absent[0]} has none, rank {next(iter(pieces))} has one"
        return JoinedTensor(None, pieces, problem=problem)
    regions = {rank: region_of(layouts[rank]) for rank in pieces}
    shape = next(iter(layouts.values())).shape
    value = next(iter(pieces.values())).new_zeros(shape)
    owner = torch.full(shape, -1)
    differing: list[UnequalElements] = []
    copies = 0
    for rank, piece in pieces.items():
        region = regions[rank]
        wanted = tuple(owner[region].shape)
        if tuple(piece.shape) != wanted:
            problem = f"rank {rank} has {tuple(piece.shape)} of it, and its shard is {wanted}"
            return JoinedTensor(None, pieces, regions, problem=problem)
        known = owner[region]
        if not piece.numel():
            continue
        if bool((known < 0).all()):
            value[region], owner[region] = piece, rank
        elif bool((known < 0).any()):
            problem = f"rank {rank} has elements that rank {int(known.max())} has as well, and others that none has"
            return JoinedTensor(None, pieces, regions, problem=problem)
        else:
            copies += 1
            differing += unequal(value[region], piece, int(known.flatten()[0]), rank)
    missing = int((owner < 0).sum())
    if missing:
        return JoinedTensor(None, pieces, regions, problem=f"no rank has {missing} of its {owner.numel()} elements")
    return JoinedTensor(value, pieces, regions, tuple(differing), copies)


def unequal(one: Tensor, other: Tensor, first: int, rank: int) -> list[UnequalElements]:
    """Return how two copies differ, bitwise: NaN equals itself, and -0.0 is not 0.0."""
    if same_bits(one, other):
        return []
    return [UnequalElements(first, rank, *distance_of_copies(one, other))]
