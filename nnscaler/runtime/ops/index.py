"""Index, gather, scatter and put where this rank has a block of the entries that indices point to.

The block holds the entries first .. first + n of `size` along a dim. Reads of other entries give zero, so that the
ranks' results add up to the whole one; writes to other entries are dropped. An index that torch's operator refuses is
refused here too, on whichever rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.ops.loss import check_indices


def _within(index: Tensor, first: int, length: int, size: int, wraps: bool = False) -> tuple[Tensor, Tensor]:
    """Return the indices into the block, and which of them are: those that are not read entry 0. `wraps`: negative ones
    count from the end. Raises for an index that is none of the entries."""
    index = torch.where(index < 0, index + size, index) if wraps else index
    check_indices(index, size, "index")
    local = index - first
    here = (local >= 0) & (local < length)
    return torch.where(here, local, 0), here


def index_block(x: Tensor, indices: list[Tensor | None], first: int, size: int) -> Tensor:
    """`x[:, index]` for one index tensor among full slices."""
    dim = next(i for i, t in enumerate(indices) if t is not None)
    index = indices[dim]
    assert index is not None
    local, here = _within(index, first, x.shape[dim], size, wraps=True)
    found = torch.ops.aten.index.Tensor(x, [*indices[:dim], local])
    return torch.where(here.reshape(*here.shape, *[1] * (x.dim() - dim - 1)), found, 0)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """[a, v, *r], [a, *k] -> [a, *k, *r]: `x[rows, index]`, of each row the entries that the row's own indices name."""
    rows = torch.arange(x.shape[0], device=x.device).reshape(-1, *[1] * (index.dim() - 1))
    found: Tensor = torch.ops.aten.index.Tensor(x, [rows, index])
    return found


def index_select_block(x: Tensor, dim: int, index: Tensor, first: int, size: int) -> Tensor:
    """`index_select`."""
    local, here = _within(index, first, x.shape[dim], size)
    found = torch.index_select(x, dim, local)
    return torch.where(here.reshape(-1, *[1] * (x.dim() - dim % x.dim() - 1)), found, 0)


def gather_block(x: Tensor, dim: int, index: Tensor, first: int, size: int) -> Tensor:
    """`gather`."""
    local, here = _within(index, first, x.shape[dim], size)
    return torch.where(here, torch.gather(x, dim, local), 0)


def write_block(
    operator: str, x: Tensor, dim: int, index: Tensor, first: int, size: int, *args: Any, **kwargs: Any
) -> Tensor:
    """aten.<operator>(x, dim, index, *args) for an operator that writes to entries of `x` along `dim`."""
    packet, _, overload = operator.partition(".")
    write: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, packet), overload)
    dim %= x.dim()
    local, here = _within(index, first, x.shape[dim], size, wraps=packet == "index_fill")
    adds = packet in ("index_add", "scatter_add") or "sum" in args or "sum" in kwargs.values()
    if adds and kwargs.get("include_self", True):
        shape = here.shape if here.dim() == x.dim() else [-1 if i == dim else 1 for i in range(x.dim())]
        source = args[0] if here.dim() < x.dim() else args[0][tuple(slice(n) for n in here.shape)]
        return write(x, dim, local, torch.where(here.reshape(shape), source, 0), *args[1:], **kwargs)
    wide, places = _with_spare(x, dim, local, here, dim if here.dim() == x.dim() else 0)
    return write(wide, dim, places, *args, **kwargs).narrow(dim, 0, x.shape[dim])


def _with_spare(x: Tensor, dim: int, local: Tensor, here: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """`x` with an entry more along `dim` for each entry along dim `along` of the indices, and indices that send there
    what is not in the block: no two writes meet that did not before."""
    count = local.shape[along] if local.dim() else 1
    spare = x.new_zeros([count if i == dim else n for i, n in enumerate(x.shape)])
    shape = [-1 if i == along else 1 for i in range(local.dim())]
    beyond = torch.arange(x.shape[dim], x.shape[dim] + count, device=x.device).reshape(shape)
    return torch.cat([x, spare], dim), torch.where(here, local, beyond)


def index_put_block(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool, first: int, size: int
) -> Tensor:
    """`x[:, index] = values` for one index tensor among full slices."""
    dim = next(i for i, t in enumerate(indices) if t is not None)
    index = indices[dim]
    assert index is not None
    local, here = _within(index, first, x.shape[dim], size, wraps=True)
    put = torch.ops.aten.index_put.default
    if accumulate:
        kept = torch.where(here.reshape(*here.shape, *[1] * (x.dim() - dim - 1)), values, 0)
        return put(x, [*indices[:dim], local], kept, True)
    flat, wanted = local.flatten(), [*x.shape[:dim], *local.shape, *x.shape[dim + 1 :]]
    wide, places = _with_spare(x, dim, flat, here.flatten(), 0)
    spread = values.expand(wanted).flatten(dim, dim + local.dim() - 1) if local.dim() else values
    places = places.reshape(()) if not local.dim() else places
    return put(wide, [*indices[:dim], places], spread).narrow(dim, 0, x.shape[dim])


def masked_scatter_block(x: Tensor, mask: Tensor, source: Tensor, first: int) -> Tensor:
    """`masked_scatter` on the rows first .. first + n of what `mask` covers: rows before take from `source` first."""
    if not source.numel():
        return x.clone()
    place = (mask.flatten().cumsum(0) - 1).reshape(mask.shape).narrow(0, first, x.shape[0])
    here = mask.narrow(0, first, x.shape[0])
    return torch.where(here, source.flatten()[torch.where(here, place, 0)], x)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    mode: int,
    include_last_offset: bool,
    padding_idx: int | None,
    rows: int | None = None,
    first_row: int = 0,
    bags: int | None = None,
    first_bag: int = 0,
) -> Tensor:
    """[v, d], [b, l] -> [b, d], or with `offsets` [v, d], [n], [o] -> [b, d]: the sum (mode 0), mean (1) or maximum (2)
    of each bag of rows, sums with `weights` (per entry).

    With `rows`, the size of the whole vocabulary, `weight` is its block from `first_row` on, and ids elsewhere add
    nothing (a mean still counts them). With `bags`, so many of the bags, from `first_bag` on, that `offsets` tells.
    """
    if offsets is not None and bags is not None:
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], offsets.new_full((1,), len(indices))])
        offsets = offsets[first_bag : first_bag + bags]
        low, high = int(offsets[0]), int(ends[first_bag + bags - 1])
        indices, weights = indices[low:high], None if weights is None else weights[low:high]
        offsets, include_last_offset = offsets - low, False
    bag: Callable[..., Tensor] = torch.nn.functional.embedding_bag
    if rows is None:
        kind = ("sum", "mean", "max")[mode]
        return bag(
            indices,
            weight,
            offsets,
            mode=kind,
            per_sample_weights=weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
    local, here = _within(indices, first_row, weight.shape[0], rows)
    counts = torch.ones_like(here) if padding_idx is None else indices != padding_idx % rows
    share = torch.where(here & counts, torch.ones((), dtype=weight.dtype) if weights is None else weights, 0.0)
    total = bag(local, weight, offsets, mode="sum", per_sample_weights=share, include_last_offset=include_last_offset)
    if mode == 0:
        return total
    ones = weight.new_ones(1, 1)
    number = bag(
        torch.zeros_like(local),
        ones,
        offsets,
        mode="sum",
        per_sample_weights=counts.to(weight.dtype),
        include_last_offset=include_last_offset,
    )
    return total / number.clamp(min=1.0)
