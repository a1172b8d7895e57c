"""Differentiable conversions between the layouts of one tensor on one axis: the rows of the conversion table.

Each function is one row: a change of state whose backward is the adjoint under the pairing of `layout`. Each call is
one autograd node on every rank of the axis, so that ranks agree on backward communication; an identity returns a view,
never its argument. On the micro-batch axis only rows that communicate neither way are legal.

`outer`, `sections` and `sizes` are those of the *local* dim (whole along this axis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nnscaler.layout import Partial, Sharded, State
from nnscaler.runtime.communication.collectives_in_graphs import CollectivesInGraphs, ParameterInGraph
from nnscaler.runtime.communication.communicator import Communicator, ProgramError, program_place
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads, Read
from nnscaler.runtime.communication.token_slice_cache import KeptRows
from nnscaler.runtime.cut_tensors import join_pieces, piece_of, pieces_of, place_piece
from nnscaler.runtime.torch_compile import apart, place_in_graph

# One mesh axis as a rank sees it.


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup:
    """The ranks that differ from this one only in their coordinate on one axis.

    An axis in time, of micro-batches or of the pieces of a region, has an `index` (the current one) and no
    communicator: its "ranks" are moments.

    name           of the axis
    size           number of ranks
    index          this rank's coordinate
    ranks          in the order of the coordinate
    communicator   None on an axis in time
    kept           on the axis of slices, what the slices of a micro-batch keep for each other
    reads          gathers parameters before they are read
    number         of the communicator, where its calls are in graphs that are compiled; None: graphs end before them
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...] = ()
    communicator: Communicator | None = None
    kept: KeptRows | None = None
    reads: ParameterReads | None = None
    number: int | None = None

    def connected(self) -> Communicator:
        """Return the communicator. Raises ProgramError on an axis in time, over which nothing can be sent."""
        if self.communicator is None:
            raise ProgramError(f"axis {self.name!r} has no ranks to communicate with")
        return self.communicator

    def calls(self) -> Communicator | CollectivesInGraphs:
        """Return what makes collectives, here or in the graph that torch.compile makes. Raises as `connected`."""
        if self.number is not None and torch.compiler.is_dynamo_compiling():
            return CollectivesInGraphs(self.number, place_in_graph(), self.index)
        return self.connected()


Sizes = tuple[int, ...]
Kernel = Callable[[Tensor, AxisGroup], Tensor]


class Conversion(torch.autograd.Function):
    """Applies one kernel forward and another backward. The axis is captured with the coordinate it has in forward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: AxisGroup, kernel: Kernel, adjoint: Kernel) -> Tensor:
        ctx.axis, ctx.adjoint = axis, adjoint
        ctx.place = None if torch.compiler.is_dynamo_compiling() else program_place()  # calls in graphs have their own
        return kernel(tensor, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        axis: AxisGroup = ctx.axis
        if axis.communicator is None or ctx.place is None:
            return ctx.adjoint(gradients[0], axis), None, None, None
        with axis.communicator.at(ctx.place):
            return ctx.adjoint(gradients[0], axis), None, None, None


class _ParameterRead(torch.autograd.Function):
    """Gathers a parameter, and gives the gradient of the whole away: autograd sees none, it comes later."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, reads: ParameterReads, read: Read) -> Tensor:
        ctx.reads, ctx.read = reads, read
        return reads.whole(read)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        ctx.reads.give(ctx.read, gradients[0])
        return None, None, None


def _convert(tensor: Tensor, axis: AxisGroup, kernel: Kernel, adjoint: Kernel) -> Tensor:
    if axis.number is not None or axis.communicator is None:  # nothing is sent on an axis in time
        return cast(Tensor, Conversion.apply(tensor, axis, kernel, adjoint))
    return cast(Tensor, apart(Conversion.apply, tensor, axis, kernel, adjoint))


# -- kernels: what one direction of a row does ------------------------------------------------------------------------


def _same(tensor: Tensor, _: AxisGroup) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, axis: AxisGroup) -> Tensor:
    return axis.calls().all_reduce(tensor, axis.ranks)


def _maximum(tensor: Tensor, axis: AxisGroup) -> Tensor:
    return axis.calls().all_reduce(tensor, axis.ranks, "max")


def _first(tensor: Tensor, axis: AxisGroup) -> Tensor:
    return tensor.clone() if axis.index == 0 else torch.zeros_like(tensor)


def _slice(cut: Sharded) -> Kernel:
    def piece(tensor: Tensor, axis: AxisGroup) -> Tensor:
        found = piece_of(tensor, cut, axis.size, axis.index)
        if axis.communicator is None and not torch.compiler.is_dynamo_compiling():
            return found.contiguous()  # later pieces need the whole: a view of it takes no memory
        # torch 2.11 loses the gradient of a view that a Function in a graph returns
        return found.clone(memory_format=torch.contiguous_format)

    return piece


def _place(cut: Sharded) -> Kernel:
    return lambda tensor, axis: place_piece(tensor, cut, axis.size, axis.index)


def _gather(cut: Sharded) -> Kernel:
    def gather(tensor: Tensor, axis: AxisGroup) -> Tensor:
        shapes = [cut.shape_at(tensor.shape, i) for i in range(axis.size)] if cut.sizes else None
        return join_pieces(axis.calls().all_gather(tensor, axis.ranks, shapes), cut)

    return gather


def _sum_scatter(cut: Sharded) -> Kernel:
    return lambda tensor, axis: axis.calls().reduce_scatter(pieces_of(tensor, cut, axis.size), axis.ranks)


def _exchange(split: Sharded, join: Sharded) -> Kernel:
    def exchange(tensor: Tensor, axis: AxisGroup) -> Tensor:
        pieces, shapes = pieces_of(tensor, split, axis.size), None
        if split.sizes or join.sizes:
            rows = [join.shape_at(pieces[0].shape, i) for i in range(axis.size)]
            shapes = [[split.shape_at(row, j) for j in range(axis.size)] for row in rows]
        return join_pieces(axis.calls().all_to_all(pieces, axis.ranks, shapes), join)

    return exchange


# -- rows -------------------------------------------------------------------------------------------------------------


def replicate(x: Tensor, axis: AxisGroup) -> Tensor:
    """Invariant -> Replicated: nothing / all_reduce."""
    return _convert(x, axis, _same, _sum)


def shard(x: Tensor, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()) -> Tensor:
    """Invariant -> Sharded: slice / all_gather."""
    cut = Sharded(dim, outer, sections, sizes)
    return _convert(x, axis, _slice(cut), _gather(cut))


def keep_first(x: Tensor, axis: AxisGroup) -> Tensor:
    """Invariant -> Partial: x on the first rank and zeros elsewhere / nothing."""
    return _convert(x, axis, _first, _same)


def all_gather(
    x: Tensor | ParameterInGraph, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()
) -> Tensor:
    """Sharded -> Invariant: all_gather / slice."""
    cut = Sharded(dim, outer, sections, sizes)
    if isinstance(x, ParameterInGraph):
        assert not x.part.requires_grad, "the way back would be a sum"
        return x.whole(axis.ranks, axis.index, cut)
    if isinstance(x, torch.nn.Parameter) and not x.requires_grad:
        return cast(Tensor, apart(_read_frozen, x, axis, cut))
    return _convert(x, axis, _gather(cut), _slice(cut))


def _read_frozen(x: torch.nn.Parameter, axis: AxisGroup, cut: Sharded) -> Tensor:
    if axis.reads is None or not axis.reads.knows(x):
        return _gather(cut)(x.detach(), axis)
    return axis.reads.whole(Read(x, axis.ranks, axis.index, cut, program_place()))


def all_gather_replicated(
    x: Tensor | ParameterInGraph, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()
) -> Tensor:
    """Sharded -> Replicated: all_gather / reduce_scatter."""
    cut = Sharded(dim, outer, sections, sizes)
    if isinstance(x, ParameterInGraph):
        return x.whole(axis.ranks, axis.index, cut)
    if axis.reads is None or not isinstance(x, torch.nn.Parameter):
        return _convert(x, axis, _gather(cut), _sum_scatter(cut))
    return cast(Tensor, apart(_read_or_gather, x, axis, axis.reads, cut))


def _read_or_gather(x: torch.nn.Parameter, axis: AxisGroup, reads: ParameterReads, cut: Sharded) -> Tensor:
    read = Read(x, axis.ranks, axis.index, cut, program_place())
    if reads.knows(x):
        return cast(Tensor, _ParameterRead.apply(x, reads, read))
    whole = cast(Tensor, Conversion.apply(x, axis, _gather(cut), _sum_scatter(cut)))  # a version of a stream
    return reads.remember(whole, read)


def place(x: Tensor, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()) -> Tensor:
    """Sharded -> Partial: the shard at its place in zeros / slice."""
    cut = Sharded(dim, outer, sections, sizes)
    return _convert(x, axis, _place(cut), _slice(cut))


def all_to_all(
    x: Tensor,
    axis: AxisGroup,
    from_dim: int,
    to_dim: int,
    outers: tuple[int, int] = (1, 1),
    sizes: tuple[Sizes, Sizes] = ((), ()),
) -> Tensor:
    """Sharded -> Sharded on another dim, or on another digit of one dim: all_to_all / all_to_all.

    `outers`, `sizes`: of the dim that is joined, and of the one that is cut.
    """
    parts, (from_outer, to_outer) = axis.size, outers
    before, after = Sharded(from_dim, from_outer, (), sizes[0]), Sharded(to_dim, to_outer, (), sizes[1])
    split, join = after, before
    back_split, back_join = before, after
    if from_dim == to_dim:  # each side lacks the digit it is sharded by, which moves the other digit if it lies below
        if any(sizes):
            raise ProgramError(f"all_to_all on dim {to_dim}: unequal sizes have no digits to exchange")
        if to_outer % (from_outer * parts) == 0:
            split = back_join = Sharded(to_dim, to_outer // parts)
        elif from_outer % (to_outer * parts) == 0:
            join = back_split = Sharded(from_dim, from_outer // parts)
        else:
            raise ProgramError(f"all_to_all on dim {to_dim}: outers {from_outer} and {to_outer} overlap")
    return _convert(x, axis, _exchange(split, join), _exchange(back_split, back_join))


def all_reduce(x: Tensor, axis: AxisGroup, reduction: str = "sum") -> Tensor:
    """Partial -> Invariant: all_reduce / nothing. A maximum has no gradient: only for tensors that need none."""
    if reduction == "max":
        if x.requires_grad:
            raise ProgramError(f"all_reduce of a maximum over {axis.name!r} of a tensor that needs a gradient")
        return _convert(x, axis, _maximum, _same)
    return _convert(x, axis, _sum, _same)


def all_reduce_replicated(x: Tensor, axis: AxisGroup) -> Tensor:
    """Partial -> Replicated: all_reduce / all_reduce."""
    return _convert(x, axis, _sum, _sum)


def reduce_scatter(
    x: Tensor, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()
) -> Tensor:
    """Partial -> Sharded: reduce_scatter / all_gather."""
    cut = Sharded(dim, outer, sections, sizes)
    return _convert(x, axis, _sum_scatter(cut), _gather(cut))


def invariant(x: Tensor, axis: AxisGroup) -> Tensor:
    """Replicated -> Invariant: nothing / the gradient on the first rank and zeros elsewhere."""
    return _convert(x, axis, _same, _first)


def shard_replicated(
    x: Tensor, axis: AxisGroup, dim: int, outer: int = 1, sections: Sizes = (), sizes: Sizes = ()
) -> Tensor:
    """Replicated -> Sharded: slice / the shard at its place in zeros."""
    cut = Sharded(dim, outer, sections, sizes)
    return _convert(x, axis, _slice(cut), _place(cut))


def keep_first_replicated(x: Tensor, axis: AxisGroup) -> Tensor:
    """Replicated -> Partial: x on the first rank and zeros elsewhere / the same."""
    return _convert(x, axis, _first, _first)


class _Append(torch.autograd.Function):
    """Appends the rows of a slice to those of the slices before it. Later slices run backward first, and leave their
    terms of the gradient of these rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, kept: KeptRows, index: int, name: str, dim: int) -> Tensor:
        ctx.kept, ctx.index, ctx.name, ctx.dim = kept, index, name, dim
        return torch.cat(kept.append(name, index, tensor.detach()), dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:
        return ctx.kept.gradient(ctx.name, ctx.index, gradients[0], ctx.dim), None, None, None, None


def append(x: Tensor, axis: AxisGroup, name: str, dim: int, sizes: Sizes = ()) -> Tensor:
    """Sharded -> Prefix, over slices: after the rows of earlier slices / the sum of all slices' terms of own rows.

    `name`: under which the rows are kept, one for each call of a stage. `sizes`: of unequal slices. Raises ProgramError
    where slices do not run in order, or have other sizes.
    """
    if axis.kept is None:
        raise ProgramError(f"axis {axis.name!r} has no slices that keep rows for each other")
    if sizes and x.shape[dim] != sizes[axis.index]:
        raise ProgramError(f"slice {axis.index} has {x.shape[dim]} rows of {name}, and not {sizes[axis.index]}")
    return cast(Tensor, apart(_Append.apply, x, axis.kept, axis.index, name, dim))


def own_rows(x: Tensor, axis: AxisGroup, dim: int, sizes: Sizes = ()) -> Tensor:
    """Prefix -> Sharded, over slices: the last rows, which the slice has added / those of the gradient after zeros."""
    rows = sizes[axis.index] if sizes else x.shape[dim] // (axis.index + 1)
    return x.narrow(dim, x.shape[dim] - rows, rows)


# -- the end of a region that runs in pieces --------------------------------------------------------------------------


def join(pieces: Iterable[tuple[Tensor, ...]], axis: AxisGroup, *states: State) -> tuple[Tensor, ...]:
    """Bring the results of the pieces of a region out of it, each by its row to Invariant on the axis in time.

    `pieces` are made one after another while this runs; `states` say how each result lies over them, in local
    coordinates. Partial: they are added up as they are made (or the largest is taken, of a tensor without gradient).
    Sharded: they are joined. Replicated and Invariant: the first one, which alone gets a gradient. Raises ProgramError
    where there are other pieces or results than the axis and `states` say.
    """
    kept: list[list[Tensor]] = [[] for _ in states]
    count = 0
    for results in pieces:
        if len(results) != len(states):
            raise ProgramError(f"a piece of {axis.name!r} has {len(results)} results, and {len(states)} are joined")
        for number, (result, state) in enumerate(zip(results, states, strict=True)):
            if isinstance(state, Sharded) or not kept[number]:
                kept[number].append(result)
            elif isinstance(state, Partial):
                kept[number] = [_together(kept[number][0], result, state, axis)]
        count += 1
    if count != axis.size:
        raise ProgramError(f"{count} pieces of {axis.name!r} are joined, which has {axis.size}")
    return tuple(
        join_pieces(those, state) if isinstance(state, Sharded) else those[0]
        for those, state in zip(kept, states, strict=True)
    )


def _together(total: Tensor, result: Tensor, state: Partial, axis: AxisGroup) -> Tensor:
    if state.reduction == "sum":
        return total + result
    if result.requires_grad:
        raise ProgramError(f"the maximum over {axis.name!r} of a tensor that needs a gradient")
    return torch.maximum(total, result)
