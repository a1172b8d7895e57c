"""One mesh axis as a rank sees it, and the cutting and joining of tensors along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator, ProgramError


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup:
    """The ranks that differ from this one only in their coordinate on one axis.

    The micro-batch axis has an `index` (the current micro-batch) and no communicator: its "ranks" are moments.

    name           of the axis
    size           number of ranks
    index          this rank's coordinate
    ranks          in the order of the coordinate
    communicator   None on the micro-batch axis
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...] = ()
    communicator: Communicator | None = None

    def connected(self) -> Communicator:
        """Return the communicator. Raises ProgramError on the micro-batch axis, over which nothing can be sent."""
        if self.communicator is None:
            raise ProgramError(f"axis {self.name!r} has no ranks to communicate with")
        return self.communicator


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
        size = tensor.shape[self.dim]
        if self.sizes:
            return self._uneven_piece(tensor, parts, index)
        if self.sections:
            if sum(self.sections) != size or any(s % parts for s in self.sections):
                raise ValueError(f"sections {self.sections} do not cut a dim of size {size} in {parts}")
            wholes = tensor.split(list(self.sections), self.dim)
            return torch.cat([w.chunk(parts, self.dim)[index] for w in wholes], self.dim)
        if size % (self.outer * parts):
            raise ValueError(f"dim {self.dim} of shape {tuple(tensor.shape)} does not divide by {self.outer} x {parts}")
        if self.outer == 1:
            inner = size // parts
            return tensor.narrow(self.dim, index * inner, inner)
        view = tensor.unflatten(self.dim, (self.outer, parts, size // (self.outer * parts)))
        return view.select(self.dim + 1, index).flatten(self.dim, self.dim + 1)

    def _uneven_piece(self, tensor: Tensor, parts: int, index: int) -> Tensor:
        if self.sections or len(self.sizes) != parts or sum(self.sizes) * self.outer != tensor.shape[self.dim]:
            raise ValueError(f"{self} does not cut a tensor of shape {tuple(tensor.shape)} in {parts}")
        start, size = sum(self.sizes[:index]), self.sizes[index]
        if self.outer == 1:
            return tensor.narrow(self.dim, start, size)
        view = tensor.unflatten(self.dim, (self.outer, sum(self.sizes)))
        return view.narrow(self.dim + 1, start, size).flatten(self.dim, self.dim + 1)

    def shape_at(self, piece: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the shape of the piece of `index`, from the shape of any of them."""
        if not self.sizes:
            return tuple(piece)
        return (*piece[: self.dim], self.sizes[index] * self.outer, *piece[self.dim + 1 :])

    def pieces(self, tensor: Tensor, parts: int) -> list[Tensor]:
        return [self.piece(tensor, parts, index) for index in range(parts)]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join all pieces: the inverse of `pieces`."""
        parts = len(pieces)
        if self.sections:
            cut = [p.split([s // parts for s in self.sections], self.dim) for p in pieces]
            return torch.cat([piece for section in zip(*cut, strict=True) for piece in section], self.dim)
        if self.outer == 1:
            return torch.cat(list(pieces), self.dim)
        views = [p.unflatten(self.dim, (self.outer, p.shape[self.dim] // self.outer)) for p in pieces]
        return torch.cat(views, self.dim + 1).flatten(self.dim, self.dim + 1)

    def place(self, piece: Tensor, parts: int, index: int) -> Tensor:
        """Return the whole dim, with `piece` at its place and zeros elsewhere."""
        shapes = [self.shape_at(piece.shape, i) for i in range(parts)]
        return self.join([piece if i == index else piece.new_zeros(shape) for i, shape in enumerate(shapes)])
