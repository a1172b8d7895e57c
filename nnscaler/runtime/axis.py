"""One mesh axis as a rank sees it, and the cutting and joining of tensors along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nnscaler.runtime.communicator import Communicator, ProgramError


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup:
    """The ranks that differ from this one only in their coordinate on axis `name`, in the order of that coordinate.

    The micro-batch axis has an `index` (the current micro-batch) and no communicator: its "ranks" are moments.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...] = ()
    communicator: Communicator | None = None

    def connected(self) -> Communicator:
        """The communicator. Raises ProgramError on the micro-batch axis, over which nothing can be sent."""
        if self.communicator is None:
            raise ProgramError(f"axis {self.name!r} has no ranks to communicate with")
        return self.communicator


@dataclass(frozen=True, slots=True)
class Cut:
    """How one axis splits one local dim: the dim, viewed as (outer, parts, inner), or section by section."""

    dim: int
    outer: int = 1
    sections: tuple[int, ...] = ()

    def piece(self, tensor: Tensor, parts: int, index: int) -> Tensor:
        """The piece of `index`; may be a view. Raises ValueError when the dim does not divide."""
        size = tensor.shape[self.dim]
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

    def pieces(self, tensor: Tensor, parts: int) -> list[Tensor]:
        return [self.piece(tensor, parts, index) for index in range(parts)]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of `pieces`."""
        parts = len(pieces)
        if self.sections:
            cut = [p.split([s // parts for s in self.sections], self.dim) for p in pieces]
            return torch.cat([piece for section in zip(*cut, strict=True) for piece in section], self.dim)
        if self.outer == 1:
            return torch.cat(list(pieces), self.dim)
        inner = pieces[0].shape[self.dim] // self.outer
        views = [p.unflatten(self.dim, (self.outer, inner)) for p in pieces]
        return torch.stack(views, self.dim + 1).flatten(self.dim, self.dim + 2)

    def place(self, piece: Tensor, parts: int, index: int) -> Tensor:
        """The whole dim, with `piece` at its place and zeros elsewhere."""
        zeros = torch.zeros_like(piece)
        return self.join([piece if i == index else zeros for i in range(parts)])
