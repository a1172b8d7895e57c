"""Collectives as operators of torch, which torch.compile takes into its graphs.

Where a graph ends before each collective, nothing before it is fused with what comes after, and a step pays for the way
into each graph. As operators they are nodes of one graph, and find their communicator by a number. They are effects in
an order (`torch.library`), forward and backward: none is left out, made twice or moved past another one, and every rank
makes the calls of its text in the order of its text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._library.effects import EffectType

from nnscaler.layout import Sharded, parse_state
from nnscaler.runtime.communication.communicator import Communicator, Shape
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads, Read
from nnscaler.runtime.torch_compile import GraphNumbers, place_in_graph

communicators: GraphNumbers[Communicator] = GraphNumbers()


@dataclass(frozen=True, slots=True)
class CollectivesInGraphs:
    """The collectives of a communicator, as those of `Communicator`, where torch.compile reads the text.

    number  of the communicator
    place   in the program, which the calls are recorded at
    index   of this rank in the groups
    """

    number: int
    place: str
    index: int

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], reduction: str = "sum") -> Tensor:
        return cast(Tensor, torch.ops.nnscaler.all_reduce(tensor, self.number, self.place, list(ranks), reduction))

    def all_gather(self, tensor: Tensor, ranks: Sequence[int], shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        sizes = [] if shapes is None else [size for shape in shapes for size in shape]
        made = torch.ops.nnscaler.all_gather(tensor, self.number, self.place, list(ranks), sizes)
        return cast(list[Tensor], made)

    def reduce_scatter(self, pieces: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
        made = torch.ops.nnscaler.reduce_scatter(self.index, list(pieces), self.number, self.place, list(ranks))
        return cast(Tensor, made)

    def all_to_all(
        self, pieces: Sequence[Tensor], ranks: Sequence[int], shapes: Sequence[Sequence[Shape]] | None = None
    ) -> list[Tensor]:
        sizes = [] if shapes is None else [size for row in shapes for shape in row for size in shape]
        made = torch.ops.nnscaler.all_to_all(self.index, list(pieces), self.number, self.place, list(ranks), sizes)
        return cast(list[Tensor], made)


def _shapes(sizes: list[int], amount: int) -> list[Shape] | None:
    """Return so many shapes of equal lengths, of which an operator was given the sizes one after another."""
    dims = len(sizes) // amount
    return [tuple(sizes[i * dims : (i + 1) * dims]) for i in range(amount)] if sizes else None


def _rows_of_shapes(sizes: list[int], ranks: int) -> list[list[Shape]] | None:
    shapes = _shapes(sizes, ranks * ranks)
    return None if shapes is None else [shapes[i * ranks : (i + 1) * ranks] for i in range(ranks)]


@contextmanager
def _at(place: str, number: int) -> Iterator[Communicator]:
    """Open the communicator of a number, which records calls inside as made at `place`; "" where that is not known."""
    communicator = communicators[number]
    with communicator.at(place or None):
        yield communicator


# Each operator, and what it returns of tensors without values.


@torch.library.custom_op("nnscaler::all_reduce", mutates_args=())
def _all_reduce(tensor: Tensor, number: int, place: str, ranks: list[int], reduction: str) -> Tensor:
    with _at(place, number) as communicator:
        return communicator.all_reduce(tensor, ranks, reduction).contiguous()


@_all_reduce.register_fake
def _(tensor: Tensor, *_: object) -> Tensor:
    return tensor.new_empty(tensor.shape)


@torch.library.custom_op("nnscaler::all_gather", mutates_args=())
def _all_gather(tensor: Tensor, number: int, place: str, ranks: list[int], sizes: list[int]) -> list[Tensor]:
    with _at(place, number) as communicator:
        found = communicator.all_gather(tensor, ranks, _shapes(sizes, len(ranks)))
    return [piece.contiguous() for piece in found]


@_all_gather.register_fake
def _(tensor: Tensor, _: int, __: str, ranks: list[int], sizes: list[int]) -> list[Tensor]:
    return [tensor.new_empty(shape) for shape in _shapes(sizes, len(ranks)) or [tuple(tensor.shape)] * len(ranks)]


@torch.library.custom_op("nnscaler::reduce_scatter", mutates_args=())
def _reduce_scatter(index: int, pieces: list[Tensor], number: int, place: str, ranks: list[int]) -> Tensor:
    with _at(place, number) as communicator:
        assert ranks[index] == communicator.rank
        return communicator.reduce_scatter(pieces, ranks).contiguous()


@_reduce_scatter.register_fake
def _(index: int, pieces: list[Tensor], *_: object) -> Tensor:
    return pieces[index].new_empty(pieces[index].shape)


@torch.library.custom_op("nnscaler::all_to_all", mutates_args=())
def _all_to_all(
    index: int, pieces: list[Tensor], number: int, place: str, ranks: list[int], sizes: list[int]
) -> list[Tensor]:
    with _at(place, number) as communicator:
        assert ranks[index] == communicator.rank
        found = communicator.all_to_all(pieces, ranks, _rows_of_shapes(sizes, len(ranks)))
    return [piece.contiguous() for piece in found]


@_all_to_all.register_fake
def _(index: int, pieces: list[Tensor], _: int, __: str, ranks: list[int], sizes: list[int]) -> list[Tensor]:
    shapes = _rows_of_shapes(sizes, len(ranks))
    arriving = [pieces[index].shape] * len(ranks) if shapes is None else [row[index] for row in shapes]
    return [pieces[0].new_empty(shape) for shape in arriving]


# Parameters that rest in shards and are gathered where the text reads them.

numbered_reads: GraphNumbers[ParameterReads] = GraphNumbers()


@torch.library.custom_op("nnscaler::gather_parameter", mutates_args=())
def _gather_parameter(part: Tensor, at: list[int], ranks: list[int], cut: str, place: str, _again: bool) -> Tensor:
    reads, read = _read(at, ranks, cut, place)
    assert read.parameter.shape == part.shape
    return reads.whole(read)


@_gather_parameter.register_fake
def _(part: Tensor, _: list[int], ranks: list[int], cut: str, __: str, ___: bool) -> Tensor:
    dim = _cut(cut).dim
    size = sum(_cut(cut).shape_at(part.shape, i)[dim] for i in range(len(ranks)))
    return part.new_empty((*part.shape[:dim], size, *part.shape[dim + 1 :]))


@torch.library.custom_op("nnscaler::give_gradient", mutates_args=())
def _give_gradient(gradient: Tensor, at: list[int], ranks: list[int], cut: str, place: str) -> None:
    reads, read = _read(at, ranks, cut, place)
    reads.give(read, gradient.clone())  # it is on its way when the graph uses its memory again


@_give_gradient.register_fake
def _(_: Tensor, __: list[int], ___: list[int], ____: str, _____: str) -> None:
    return None


def _read(at: list[int], ranks: list[int], cut: str, place: str) -> tuple[ParameterReads, Read]:
    """Return what gathers a parameter, and where it is read. `at`: the numbers of both, and the index of this rank."""
    number, index, here = at
    reads = numbered_reads[number]
    return reads, Read(reads.parameter(index), tuple(ranks), here, _cut(cut), place or None)


@lru_cache(maxsize=1024)
def _cut(state: str) -> Sharded:
    return cast(Sharded, parse_state(state))


class _Whole(torch.autograd.Function):
    """Reads a parameter as `differentiable_collectives._ParameterRead` does, by operators of the graph."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, again: bool, *how: Any) -> Tensor:
        ctx.how = how
        return cast(Tensor, torch.ops.nnscaler.gather_parameter(part, *how, again))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        torch.ops.nnscaler.give_gradient(gradients[0], *ctx.how)
        return (None,) * (2 + len(ctx.how))


@dataclass(frozen=True, slots=True)
class ParameterInGraph:
    """A parameter that a text which torch.compile reads gathers. `number`: of what gathers it; `index`: its own
    there; `again`: whether backward gathers it once more."""

    part: Tensor
    number: int
    index: int
    again: bool

    def whole(self, ranks: Sequence[int], here: int, cut: Sharded) -> Tensor:
        """Return it gathered from `ranks`, of which this is the one of index `here`."""
        at = [self.number, self.index, here]
        whole = _Whole.apply(self.part, self.again, at, list(ranks), repr(cut), place_in_graph())
        return cast(Tensor, whole)


for _operator in (_all_reduce, _all_gather, _reduce_scatter, _all_to_all, _gather_parameter, _give_gradient):
    _operator.register_effect(EffectType.ORDERED)
