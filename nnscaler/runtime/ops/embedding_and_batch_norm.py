"""Operators on one shard of a larger tensor: vocabulary-parallel embedding, batch norm with explicit statistics, and a
product by groups that knows every dtype and stride."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nnscaler.runtime.ops.loss import check_indices, wide


def embedding_block(weight: Tensor, ids: Tensor, padding_idx: int, first_row: int, size: int | None = None) -> Tensor:
    """[v, d], [*] -> [*, d]: the rows of `ids`, zero where an id is not in this block of rows.

    `weight` holds rows first_row .. first_row + v of the vocabulary, which has `size`; for an id that is none of these
    it raises, as torch's does (size None: texts that do not say it). The row whose logical number is `padding_idx` (-1:
    none) gets no gradient.
    """
    if size is not None:
        check_indices(ids, size, "id of an embedding")
    local = ids - first_row
    here = (local >= 0) & (local < weight.shape[0])
    padding = padding_idx - first_row
    inside = padding_idx >= 0 and 0 <= padding < weight.shape[0]  # -1 is torch's "none" as well
    rows = torch.ops.aten.embedding.default(weight, torch.where(here, local, 0), padding if inside else -1)
    return torch.where(here.unsqueeze(-1), rows, 0.0)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor, first_row: int = 0, first_group: int = 0) -> Tensor:
    """[m, k], [g, k, n], [e] -> [m, n]: rows of `a` by the matrix of their group. Group i of e ends before row ends[i].

    `a` is a block of the rows that `ends` counts, from `first_row` on, and `b` has the matrices of the groups from
    `first_group` on. Rows of other groups, or after the last one, are zero. torch's kernel has no float64, and wants
    strides of 16 bytes, which a shard need not have.
    """
    ends = (ends - first_row).clamp(0, a.shape[0])
    aligned = all(t.is_contiguous() and t.shape[-1] * t.element_size() % 16 == 0 for t in (a, b))
    fast = aligned and a.dtype in (torch.bfloat16, torch.float16) and a.is_cuda
    if fast and b.shape[0] == ends.shape[0]:
        return torch._grouped_mm(a, b, offs=ends)
    bounds = [0, *ends.tolist()][first_group : first_group + b.shape[0] + 1]
    low, high = bounds[0], bounds[-1]
    if fast:
        rows = [torch._grouped_mm(a[low:high], b, offs=ends[first_group : first_group + b.shape[0]] - low)]
    else:
        rows = [a[start:end] @ b[g] for g, (start, end) in enumerate(pairwise(bounds))]
    before, after = (rows[0].new_zeros(count, b.shape[2]) for count in (low, a.shape[0] - high))
    return torch.cat([before, *rows, after])


def causal_rows(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None, enable_gqa: bool) -> Tensor:
    """[*, l, e], [*, s, e], [*, s, v] -> [*, l, v]: causal attention of the queries first .. first + l, of which row i
    sees the keys up to i.

    On a GPU torch has a fast kernel for a triangle that ends at the last key.
    """
    rows, keys = query.shape[-2], min(first + query.shape[-2], key.shape[-2])
    key, value = key.narrow(-2, 0, keys), value.narrow(-2, 0, keys)
    mask: Tensor
    if query.is_cuda and keys == first + rows:
        # imported here: the module brings in all of torch._dynamo, which no rank needs otherwise
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(rows, keys)
    else:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(first)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


def recurrent_cell(
    kind: str,
    x: Tensor,
    before: Tensor | list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute one step of a recurrent network ("lstm", "rnn_tanh", "rnn_relu") for some of its hidden units.

    The weights have the rows of these units. `before` is the whole state before it, and for an LSTM [whole state, cell
    state of these units].
    """
    linear = torch.nn.functional.linear
    state, cell = (before, None) if isinstance(before, Tensor) else before
    gates = linear(x, w_ih, b_ih) + linear(state, w_hh, b_hh)
    if cell is None:
        return gates.tanh() if kind == "rnn_tanh" else gates.relu()
    enter, forget, new, leave = gates.chunk(4, -1)
    kept: Tensor = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * kept.tanh(), kept


def view_as_complex(x: Tensor) -> Tensor:
    """[*, 2] -> [*]: pairs as complex numbers. torch wants pairs side by side in memory, and strides that are even."""
    return torch.view_as_complex(x.contiguous())


# Batch norm in parts, so that the batch can be split: what is summed over it is reduced between the parts.
# Batch norm of x [b, c, *] is batch_normalise(x, m, v, weight, bias, eps) with m = batch_mean(x) and v =
# batch_variance(x, m). On a shard both take `count`, the logical number of values of a channel. Half precision is
# computed in float32, as torch does inside.


def _over_batch(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _values(x: Tensor) -> int:
    """Of a channel."""
    return x.numel() // x.shape[1]


def _of_channels(statistic: Tensor, x: Tensor) -> Tensor:
    """[c] to [c, 1, ...], which broadcasts against x [b, c, *]."""
    return statistic.reshape(-1, *(1 for _ in x.shape[2:]))


def batch_mean(x: Tensor, count: int | None = None) -> Tensor:
    """[b, c, *] -> [c]: the sum of each channel, over the number of its values."""
    return wide(x).sum(_over_batch(x)) / (count or _values(x))


def batch_variance(x: Tensor, mean: Tensor, count: int | None = None) -> Tensor:
    """[b, c, *], [c] -> [2, c]: squared distances from the mean, over the number of values and over one less."""
    squares = (wide(x) - _of_channels(mean, x)).square().sum(_over_batch(x))
    count = count or _values(x)
    return torch.stack((squares / count, squares / max(count - 1, 1)))


def batch_normalise(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """[b, c, *], [c], [2, c], [c], [c] -> [b, c, *]: weight * (x - mean) / sqrt(variance[0] + eps) + bias."""
    scale = torch.rsqrt(variance[0] + eps)
    if weight is not None:
        scale = scale * weight
    y = (wide(x) - _of_channels(mean, x)) * _of_channels(scale, x)
    return (y if bias is None else y + _of_channels(bias, x)).to(x.dtype)


def running_statistic(old: Tensor, now: Tensor, momentum: float) -> Tensor:
    """[c], [c] -> [c]: old + momentum * (now - old); without gradient, in the dtype of `old`."""
    return old.detach().lerp(now.detach().to(old.dtype), momentum)
