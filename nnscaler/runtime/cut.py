"""Cut a tensor along one dim into the pieces of the ranks of an axis, and join them again.

This is what `Sharded` means. Conversions, parameters at rest, checkpoints and all checks cut and join by it and by
nothing else, so that what one of them relies on is what another one tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis splits one local dim, viewed as (outer, parts, inner).

    dim        that is split
    outer      how many blocks it has, each of which is split
    sections   sizes of concatenated parts, each of which is split
    sizes      of unequal pieces of each block, one per rank
    """

    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def piece(self, tensor: Tensor, parts: int, index: int) -> Tensor:
        """Return the piece of `index`; may be a view. Raises ValueError when the dim does not divide."""
        shape, dim = tensor.shape, self.dim
        if self.sections:
            if sum(self.sections) != shape[dim] or any(s % parts for s in self.sections):
                raise ValueError(f"sections {self.sections} of a dim of size {shape[dim]} over {parts} parts")
            wholes = tensor.split(list(self.sections), dim)
            return torch.cat([w.chunk(parts, dim)[index] for w in wholes], dim)
        start, length = self._range(shape[dim], parts, index)
        if self.outer == 1:
            return tensor.narrow(dim, start, length)
        blocks = tensor.reshape(*shape[:dim], self.outer, shape[dim] // self.outer, *shape[dim + 1 :])
        return blocks.narrow(dim + 1, start, length).reshape(*shape[:dim], self.outer * length, *shape[dim + 1 :])

    def _range(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """Return where in each block of a dim of `size` the piece of `index` starts, and how long it is."""
        if self.sizes:
            if self.sections or len(self.sizes) != parts or sum(self.sizes) * self.outer != size:
                raise ValueError(f"sizes {self.sizes} of a dim of size {size} over {parts} parts")
            return sum(self.sizes[:index]), self.sizes[index]
        if size % (self.outer * parts):
            raise ValueError(f"a dim of size {size} does not divide by {self.outer} x {parts}")
        length = size // (self.outer * parts)
        return index * length, length

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        """Return where in a dim of `size` the entries of the piece of `index` lie: (first, how many) of each run, in
        the order of the piece. Raises ValueError when the dim does not divide, and for sections."""
        if self.sections:
            raise ValueError(f"sections {self.sections} are no blocks of one size")
        start, length = self._range(size, parts, index)
        return [(start + block * (size // self.outer), length) for block in range(self.outer)]

    def shape_of(self, whole: Sequence[int], parts: int, index: int) -> tuple[int, ...]:
        """Return the shape of the piece of `index`, from that of the whole, which is taken to divide."""
        size = whole[self.dim] // parts
        if self.sizes:  # of each block
            size = whole[self.dim] // max(sum(self.sizes), 1) * self.sizes[index]
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def shape_at(self, piece: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the shape of the piece of `index`, from the shape of any of them."""
        if not self.sizes:
            return tuple(piece)
        return (*piece[: self.dim], self.sizes[index] * self.outer, *piece[self.dim + 1 :])

    def pieces(self, tensor: Tensor, parts: int) -> list[Tensor]:
        return [self.piece(tensor, parts, index) for index in range(parts)]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join all pieces: the inverse of `pieces`."""
        parts, dim = len(pieces), self.dim
        if self.sections:
            cut = [p.split([s // parts for s in self.sections], dim) for p in pieces]
            return torch.cat([piece for section in zip(*cut, strict=True) for piece in section], dim)
        if self.outer == 1:
            return torch.cat(list(pieces), dim)
        before, after = pieces[0].shape[:dim], pieces[0].shape[dim + 1 :]
        blocks = [p.reshape(*before, self.outer, p.shape[dim] // self.outer, *after) for p in pieces]
        return torch.cat(blocks, dim + 1).reshape(*before, sum(p.shape[dim] for p in pieces), *after)

    def place(self, piece: Tensor, parts: int, index: int) -> Tensor:
        """Return the whole dim, with `piece` at its place and zeros elsewhere."""
        shapes = [self.shape_at(piece.shape, i) for i in range(parts)]
        return self.join([piece if i == index else piece.new_zeros(shape) for i, shape in enumerate(shapes)])


@dataclass(frozen=True, slots=True)
class PrefixCut:
    """How slices in time cut a dim whose rows they keep for later ones: each has all rows up to its last one.

    dim     that is cut
    sizes   of unequal slices; empty: they are equal
    terms   whether what they have are terms of a sum
    """

    dim: int
    sizes: tuple[int, ...] = ()
    terms: bool = False

    def shape_of(self, whole: Sequence[int], parts: int, index: int) -> tuple[int, ...]:
        """Return the shape of what the slice of `index` has, from that of the whole."""
        end = sum((self.sizes or (whole[self.dim] // parts,) * parts)[: index + 1])
        return (*whole[: self.dim], end, *whole[self.dim + 1 :])

    def pieces(self, tensor: Tensor, parts: int) -> list[Tensor]:
        """Return what each slice has of a value."""
        shapes = (self.shape_of(tensor.shape, parts, index) for index in range(parts))
        return [tensor.narrow(self.dim, 0, shape[self.dim]) for shape in shapes]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole: that of the last slice, with the terms of earlier ones added to its rows."""
        *earlier, last = pieces
        if not self.terms:
            return last
        total = last.clone()
        for piece in earlier:
            total.narrow(self.dim, 0, piece.shape[self.dim]).add_(piece)
        return total

    def agree(self, pieces: Sequence[Tensor], same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Return whether earlier slices have of each row what the last one has; terms need not."""
        *earlier, last = pieces
        return self.terms or all(same(last.narrow(self.dim, 0, p.shape[self.dim]), p) for p in earlier)


class ShardedState(Protocol):
    """The common part of the compiler's `Sharded` and the runtime's."""

    @property
    def dim(self) -> int: ...

    @property
    def outer(self) -> int: ...

    @property
    def sections(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...


def cut_of(state: ShardedState) -> Cut:
    """Return how an axis in this state cuts a dim that no other axis cuts."""
    return Cut(state.dim, state.outer, state.sections, state.sizes)


def nested(cuts: Sequence[tuple[Cut, int]]) -> list[tuple[int, Cut]]:
    """Return the order in which axes cut one dim: positions in `cuts`, outermost first, and each as a local cut.

    `cuts`: the cut of each axis, with `outer` measured in the logical dim, and its parts. A local one is measured in
    what those before it leave. Raises ValueError where two axes overlap.
    """
    innermost = max((cut.outer for cut, _ in cuts), default=1)
    alone = next((cut for cut, _ in cuts if cut.sections or (cut.sizes and cut.outer < innermost)), None)
    if len(cuts) > 1 and (alone is not None or sum(bool(cut.sizes) for cut, _ in cuts) > 1):
        raise ValueError(f"{alone} takes the dim for itself, and a second axis cuts it too")
    found: list[tuple[int, Cut]] = []
    below, left = 1, 1  # the next `outer` is a multiple of `below`; `left` pieces were taken apart
    for position, (cut, parts) in sorted(enumerate(cuts), key=lambda entry: (entry[1][0].outer, entry[1][1])):
        if cut.outer % below:
            raise ValueError(f"two axes overlap on a dim: outers {[c.outer for c, _ in cuts]}")
        found.append((position, replace(cut, outer=cut.outer // left)))
        below, left = cut.outer * parts, left * parts
    return found
