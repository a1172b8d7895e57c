"""Ring attention, whose keys and values go around the ranks of an axis (Liu, Zaharia, Abbeel, 2023), with the running
maximum and sum of a softmax in blocks (Milakov, Gimelshein, 2018).

A rank holds some of the queries and as many of the keys and values, and never more than two blocks of these. In forward
each block comes by once. In backward it comes by again together with its gradients, to which every rank adds, and which
go one step further to be home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from nnscaler.layout import Sharded
from nnscaler.runtime.communication.communicator import program_place
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.cut_tensors import join_pieces, piece_of
from nnscaler.runtime.ops.loss import wide
from nnscaler.runtime.torch_compile import apart

NEVER = float("-inf")  # the score of a key that a query does not see


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    over: AxisGroup,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    outer: int = 1,
    sizes: tuple[int, ...] = (),
    mask_of_keys: bool = False,
) -> Tensor:
    """[*, l, e], [*, s, e], [*, s, v] -> [*, l, v]: attention of a rank's queries to the keys of all ranks.

    The axis `over` cuts queries and keys alike: into `outer` blocks, each of which is divided, or into unequal `sizes`.
    `mask` has this rank's rows and all columns, or, `mask_of_keys`, one row for all queries and this rank's columns.
    `causal` goes by the places in the whole.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t.to(dtype) for t in (query, key, value))
        mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    heads = query.shape[-3] if enable_gqa else 0
    if enable_gqa:  # [*, (h g), l, e] and [*, h, s, e] as [*, h, g, l, e] and [*, h, 1, s, e]
        groups = heads // key.shape[-3]
        query = query.unflatten(-3, (-1, groups))
        key, value = key.unsqueeze(-3), value.unsqueeze(-3)
        if mask is not None and mask.ndim > 2:
            mask = mask.unflatten(-3, (-1, groups)) if mask.shape[-3] == heads else mask.unsqueeze(-3)
    length = query.shape[-1] ** -0.5 if scale is None else scale
    ring = Ring(over, query.shape[-2], key.shape[-2], causal, length, outer, sizes, mask_of_keys)
    result: Tensor = apart(_around, query, key, value, mask, ring)
    return result.flatten(-4, -3) if enable_gqa else result


def _around(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return cast(Tensor, RingAttention.apply(query, key, value, mask, ring))


@dataclass(frozen=True, eq=False)
class Ring:
    """The blocks of one call.

    over          the axis around which keys and values go
    rows          of this rank
    columns       of this rank
    causal        row i sees the columns up to i, counted in the whole
    scale         of the scores
    outer, sizes  how the axis cuts rows and columns
    mask_of_keys  the mask goes around with the keys
    """

    over: AxisGroup
    rows: int
    columns: int
    causal: bool
    scale: float
    outer: int
    sizes: tuple[int, ...]
    mask_of_keys: bool

    def cut(self, dim: int) -> Sharded:
        return Sharded(dim, self.outer, (), self.sizes)

    def runs(self, own: int, index: int) -> list[tuple[int, int]]:
        """Return where in the whole the entries of the rank of `index` lie, of a dim of which this rank has `own`."""
        whole = sum(self.sizes) * self.outer if self.sizes else own * self.over.size
        return self.cut(0).runs(whole, self.over.size, index)

    def owner(self, step: int) -> int:
        """Return whose block is here after so many rotations."""
        return (self.over.index - step) % self.over.size

    def steps(self) -> range:
        return range(self.over.size)

    def pairs(self, step: int, device: torch.device) -> Iterator[tuple[slice, int, Tensor | None]]:
        """Yield rows, how many columns of the block at hand they see, and [rows, columns] which of these they do not.

        A block's columns are in the order of the whole, so that those before a row come first.
        """
        columns = self.runs(self.columns, self.owner(step))
        if not self.causal:
            yield slice(0, self.rows), sum(length for _, length in columns), None
            return
        rows = self.runs(self.rows, self.over.index)
        for (first, length), end in zip(rows, accumulate(length for _, length in rows), strict=True):
            after = first + length  # the first place that the last of these rows does not see
            seen = [(start, min(count, after - start)) for start, count in columns if start < after]
            if not seen:
                continue
            hidden = None
            if sum(seen[-1]) > first + 1:
                places = torch.cat([torch.arange(start, start + count, device=device) for start, count in seen])
                hidden = places > torch.arange(first, after, device=device).unsqueeze(-1)
            yield slice(end - length, end), sum(count for _, count in seen), hidden

    def scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, rows: slice, columns: int, hidden: Tensor | None
    ) -> Tensor:
        """[*, l, e], [*, s, e] -> [*, rows, columns] in the wide dtype; `mask` is that of the block at hand."""
        found = wide(query[..., rows, :]) @ wide(key[..., :columns, :]).mT * self.scale
        if mask is not None:
            given = _part(mask, rows, columns)
            found = found + given if given.is_floating_point() else found.masked_fill(~given, NEVER)
        return found if hidden is None else found.masked_fill(hidden, NEVER)

    def mask_at(self, mask: Tensor | None, step: int) -> Tensor | None:
        """Return the columns of the mask that are those of the block at hand."""
        if mask is None or self.mask_of_keys or mask.shape[-1] == 1:
            return mask
        return piece_of(mask, self.cut(mask.ndim - 1), self.over.size, self.owner(step))

    def rotated(self, block: Tensor, step: int, dim: int) -> Tensor:
        """Give a block that has been rotated `step` times to the next rank, and return that of the rank before."""
        shapes = None
        if self.sizes:
            owners = [(rank - step) % self.over.size for rank in self.steps()]
            shapes = [self.cut(dim % block.ndim).shape_at(block.shape, owner) for owner in owners]
        return self.over.connected().rotate(block, self.over.ranks, shapes)


class RingAttention(torch.autograd.Function):
    """Attention in blocks that go around the ranks of an axis; backward makes the scores again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        ctx.ring, ctx.place = ring, program_place()
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        top = wide(query).new_full((*batch, ring.rows, 1), NEVER)
        total = torch.zeros_like(top)
        result = top.new_zeros((*batch, ring.rows, value.shape[-1]))
        here = KeyValueBlock(key, value, mask if ring.mask_of_keys else None)
        for step in ring.steps():
            of_block = here.mask if ring.mask_of_keys else ring.mask_at(mask, step)
            for rows, columns, hidden in ring.pairs(step, query.device):
                scores = ring.scores(query, here.key, of_block, rows, columns, hidden)
                higher = torch.maximum(top[..., rows, :], scores.amax(-1, keepdim=True))
                base = _finite(higher)
                weights, less = (scores - base).exp(), (top[..., rows, :] - base).exp()
                total[..., rows, :] = total[..., rows, :] * less + weights.sum(-1, keepdim=True)
                result[..., rows, :] = result[..., rows, :] * less + weights @ wide(here.value[..., :columns, :])
                top[..., rows, :] = higher
            if step + 1 < ring.over.size:
                here = here.rotated(ring, step)
        result = result / torch.where(total > 0, total, 1.0)  # a row that sees no key is zero, as torch has it
        result = result.to(value.dtype)
        ctx.save_for_backward(query, key, value, mask, result, _finite(top + total.log()))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        with ctx.ring.over.connected().at(ctx.place):
            return (*_backward(ctx.ring, ctx.saved_tensors, wide(gradients[0]), ctx.needs_input_grad), None)


@dataclass(frozen=True, slots=True)
class KeyValueBlock:
    """The block at hand: keys, values, and a mask of keys."""

    key: Tensor
    value: Tensor
    mask: Tensor | None

    def rotated(self, ring: Ring, step: int) -> KeyValueBlock:
        mask = None if self.mask is None else ring.rotated(self.mask, step, -1)
        return KeyValueBlock(ring.rotated(self.key, step, -2), ring.rotated(self.value, step, -2), mask)


@dataclass(frozen=True, slots=True)
class BlockGradient:
    """The gradients of the block at hand; None for what nobody asks for."""

    key: Tensor | None
    value: Tensor | None
    mask: Tensor | None

    def rotated(self, ring: Ring, step: int) -> BlockGradient:
        dims = ((self.key, -2), (self.value, -2), (self.mask, -1))
        return BlockGradient(*(None if g is None else ring.rotated(g, step, dim) for g, dim in dims))

    def add(self, columns: int, key: Tensor, value: Tensor) -> None:
        """Add to the gradients of the first columns."""
        for target, term in ((self.key, key), (self.value, value)):
            if target is not None:
                _add(target[..., :columns, :], term)


def _backward(
    ring: Ring,
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    gradient: Tensor,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of queries, keys, values and mask, where they are `wanted`, from that of the result."""
    query, key, value, mask, result, normaliser = saved
    inner = (gradient * wide(result)).sum(-1, keepdim=True)
    to_query = torch.zeros_like(wide(query))
    around = mask if ring.mask_of_keys else None
    here = KeyValueBlock(key, value, around)
    to_mask = MaskGradient(ring, mask if wanted[3] else None)
    to_key, to_value = (
        torch.zeros_like(wide(t)) if asked else None for t, asked in zip((key, value), wanted[1:3], strict=True)
    )
    back = BlockGradient(to_key, to_value, to_mask.around)
    for step in ring.steps():
        of_block = here.mask if ring.mask_of_keys else ring.mask_at(mask, step)
        to_block = back.mask if ring.mask_of_keys else to_mask.at(step)
        for rows, columns, hidden in ring.pairs(step, query.device):
            scores = ring.scores(query, here.key, of_block, rows, columns, hidden)
            weights, above = (scores - normaliser[..., rows, :]).exp(), gradient[..., rows, :]
            slope = weights * (above @ wide(here.value[..., :columns, :]).mT - inner[..., rows, :])
            back.add(columns, slope.mT @ wide(query[..., rows, :]) * ring.scale, weights.mT @ above)
            _add(to_query[..., rows, :], slope @ wide(here.key[..., :columns, :]) * ring.scale)
            if to_block is not None:
                _add(_part(to_block, rows, columns), slope)
        if step + 1 < ring.over.size:
            here = here.rotated(ring, step)
        back = back.rotated(ring, step)
    found = (to_query, query), (back.key, key), (back.value, value), (to_mask.whole(back.mask), mask)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in found)


class MaskGradient:
    """The gradient of a mask (None: nobody asks for it), which goes around with the keys, or is put together from those
    of the columns of each block."""

    def __init__(self, ring: Ring, mask: Tensor | None) -> None:
        self._ring, self._mask = ring, mask
        self.around = torch.zeros_like(wide(mask)) if mask is not None and ring.mask_of_keys else None
        self._blocks: dict[int, Tensor] = {}  # by owner

    def at(self, step: int) -> Tensor | None:
        """Return the gradient of the columns of the block at hand, to be added to."""
        columns = self._ring.mask_at(self._mask, step)
        if columns is None:
            return None
        owner = 0 if self._mask is not None and self._mask.shape[-1] == 1 else self._ring.owner(step)
        return self._blocks.setdefault(owner, torch.zeros_like(wide(columns)))

    def whole(self, around: Tensor | None) -> Tensor | None:
        """Return it all, at the end. `around`: what came home."""
        if self._mask is None or self._ring.mask_of_keys:
            return around
        if self._mask.shape[-1] == 1:
            return self._blocks[0]
        return join_pieces([self._blocks[i] for i in self._ring.steps()], self._ring.cut(self._mask.ndim - 1))


def _finite(top: Tensor) -> Tensor:
    """[*, l, 1]: zero where a row has seen no key yet, so that no infinity is taken from another."""
    return torch.where(top == NEVER, 0.0, top)


def _part(mask: Tensor, rows: slice, columns: int) -> Tensor:
    """Return the rows and first columns of a mask, of which it may have one for all."""
    part = mask if mask.shape[-1] == 1 else mask[..., :columns]
    return part if part.ndim < 2 or part.shape[-2] == 1 else part[..., rows, :]


def _add(target: Tensor, term: Tensor) -> None:
    """Add to a view, summing over what it has once for all."""
    target += term.sum_to_size(target.shape)
