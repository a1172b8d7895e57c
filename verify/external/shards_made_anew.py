"""Shards whose values a program makes by itself, as one does that initialises parameters again after it has cut them.

Neither a layout of DTensor nor values say which elements of the model such a shard holds; its shape may, where ranks
along axes of the mesh divide one dim of a tensor of that name between them, in their order. It is then given the
model's values. That is a guess, which the first loss confirms: with the model's elements in other places it would be
another one, and then nothing that differs is taken for wrong.

Worked example: `up.weight` is [8, 6] in the model and [4, 6] on each of two ranks of dp. It is cut in rows, and rank 1
holds the last four.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verify.external.parameter_mapping import Addresses, Lookup, RankPiece, StateMap, give, local_value, own_name
from verify.programs.module_tensors_by_every_name import Kind

GUESSED = "guessed"  # how a piece of it is found


def with_shards_made_anew(
    pieces: Sequence[RankPiece],
    tensors: Sequence[tuple[str, Tensor, Kind]],
    lookup: Lookup,
    places: Mapping[str, tuple[int, int]],
    known: Sequence[RankPiece] = (),
) -> tuple[RankPiece, ...]:
    """Place the unmatched shards that have the name of a parameter of the model, and give them its values.

    places  this rank's place on each axis of the mesh, and the size of the axis
    known   pieces that an earlier run in float64 has found
    """
    before = {piece.local: piece.addresses for piece in known if piece.found == GUESSED}
    made = []
    for piece, (local, tensor, _) in zip(pieces, tensors, strict=True):
        addresses: Addresses | None = None
        if piece.addresses is None and piece.trained and not isinstance(tensor, DTensor):
            addresses = before[local] if local in before else _cut(tensor, own_name(local), lookup, places)
        if addresses is not None:
            give(tensor, lookup.start, addresses)
            names = lookup.space.names_at(addresses) or (own_name(local),)
            piece = replace(piece, names=names, addresses=addresses, found=GUESSED)
        made.append(piece)
    return tuple(made)


def _cut(tensor: Tensor, name: str, lookup: Lookup, places: Mapping[str, tuple[int, int]]) -> Tensor | None:
    """Return the addresses of a shard; None where it has other sizes than one of the cuts, where several are as likely,
    and where some of its values are the model's: then they were not made anew."""
    value, space = local_value(tensor), lookup.space
    whole = space.shapes.get(name)
    if whole is None or space.kinds[name] != "parameter" or len(whole) != value.dim():
        return None
    dims = [dim for dim, (here, there) in enumerate(zip(value.shape, whole, strict=True)) if here != there]
    if len(dims) != 1 or lookup.by_value(value)[1]:
        return None
    (dim,) = dims
    firsts = {first for first, count in _parts(whole[dim], places) if count == value.shape[dim]}
    if len(firsts) != 1:
        return None
    return _addresses(space, name).narrow(dim, firsts.pop(), value.shape[dim]).reshape(-1)


def _addresses(space: StateMap, name: str) -> Tensor:
    whole = space.whole(name)
    return torch.arange(whole.start, whole.stop).view(space.shapes[name])


def _parts(size: int, places: Mapping[str, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first index and the count of this rank's part of a dim, cut over any axes as `torch.chunk` and
    `torch.tensor_split` cut."""
    axes = [place for place in places.values() if place[1] > 1]
    for some in chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1)):
        parts, index = prod(count for _, count in some), 0
        for at, count in some:
            index = index * count + at
        each = -(-size // parts)
        first = min(index * each, size)
        yield first, min(each, size - first)
        more = size % parts
        yield index * (size // parts) + min(index, more), size // parts + (index < more)
