"""Cut a tensor along one dim into the pieces of the ranks of an axis, and join them again.

This is what `Sharded` means. Conversions, parameters at rest, checkpoints and all checks cut and join by it and by
nothing else, so that what one of them relies on is what another one tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nnscaler.layout import Prefix, Sharded


def piece_of(tensor: Tensor, cut: Sharded, parts: int, index: int) -> Tensor:
    """Return the piece of `index`; may be a view. Raises ValueError when the dim does not divide."""
    shape, dim = tensor.shape, cut.dim
    if cut.sections:
        if sum(cut.sections) != shape[dim] or any(s % parts for s in cut.sections):
            raise ValueError(f"sections {cut.sections} of a dim of size {shape[dim]} over {parts} parts")
        wholes = tensor.split(list(cut.sections), dim)
        return torch.cat([w.chunk(parts, dim)[index] for w in wholes], dim)
    start, length = cut.range_in_block(shape[dim], parts, index)
    if cut.outer == 1:
        return tensor.narrow(dim, start, length)
    blocks = tensor.reshape(*shape[:dim], cut.outer, shape[dim] // cut.outer, *shape[dim + 1 :])
    return blocks.narrow(dim + 1, start, length).reshape(*shape[:dim], cut.outer * length, *shape[dim + 1 :])


def pieces_of(tensor: Tensor, cut: Sharded | Prefix, parts: int) -> list[Tensor]:
    """Return what each rank has, or each slice in time: of a prefix, all rows up to its last one."""
    if isinstance(cut, Prefix):
        return [tensor.narrow(cut.dim, 0, end) for end in cut.ends(tensor.shape[cut.dim], parts)]
    return [piece_of(tensor, cut, parts, index) for index in range(parts)]


def join_pieces(pieces: Sequence[Tensor], cut: Sharded | Prefix) -> Tensor:
    """Join all pieces: the inverse of `pieces_of`. Terms of earlier slices are added to the rows of the last one."""
    if isinstance(cut, Prefix):
        *earlier, last = pieces
        total = last.clone() if cut.terms else last
        for piece in earlier if cut.terms else ():
            total.narrow(cut.dim, 0, piece.shape[cut.dim]).add_(piece)
        return total
    parts, dim = len(pieces), cut.dim
    if cut.sections:
        split = [p.split([s // parts for s in cut.sections], dim) for p in pieces]
        return torch.cat([piece for section in zip(*split, strict=True) for piece in section], dim)
    if cut.outer == 1:
        return torch.cat(list(pieces), dim)
    before, after = pieces[0].shape[:dim], pieces[0].shape[dim + 1 :]
    blocks = [p.reshape(*before, cut.outer, p.shape[dim] // cut.outer, *after) for p in pieces]
    return torch.cat(blocks, dim + 1).reshape(*before, sum(p.shape[dim] for p in pieces), *after)


def place_piece(piece: Tensor, cut: Sharded, parts: int, index: int) -> Tensor:
    """Return the whole dim, with `piece` at its place and zeros elsewhere."""
    shapes = [cut.shape_at(piece.shape, i) for i in range(parts)]
    return join_pieces([piece if i == index else piece.new_zeros(shape) for i, shape in enumerate(shapes)], cut)


def nested(cuts: Sequence[tuple[Sharded, int]]) -> list[tuple[int, Sharded]]:
    """Return the order in which axes cut one dim: positions in `cuts`, outermost first, and each as a local cut.

    `cuts`: the cut of each axis, with `outer` measured in the logical dim, and its parts. A local one is measured in
    what those before it leave. Raises ValueError where two axes overlap.
    """
    innermost = max((cut.outer for cut, _ in cuts), default=1)
    alone = next((cut for cut, _ in cuts if cut.sections or (cut.sizes and cut.outer < innermost)), None)
    if len(cuts) > 1 and (alone is not None or sum(bool(cut.sizes) for cut, _ in cuts) > 1):
        raise ValueError(f"{alone} takes the dim for itself, and a second axis cuts it too")
    found: list[tuple[int, Sharded]] = []
    below, left = 1, 1  # the next `outer` is a multiple of `below`; `left` pieces were taken apart
    for position, (cut, parts) in sorted(enumerate(cuts), key=lambda entry: (entry[1][0].outer, entry[1][1])):
        if cut.outer % below:
            raise ValueError(f"two axes overlap on a dim: outers {[c.outer for c, _ in cuts]}")
        found.append((position, replace(cut, outer=cut.outer // left)))
        below, left = cut.outer * parts, left * parts
    return found
