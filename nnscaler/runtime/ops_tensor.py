"""Operators on one shard of a larger tensor: vocabulary-parallel embedding, and a product by groups that knows every
dtype and stride."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def embedding_block(weight: Tensor, ids: Tensor, padding_idx: int, first_row: int) -> Tensor:
    """[v, d], [*] -> [*, d]: the rows of `ids`, zero where an id is not in this block of rows.

    `weight` holds rows first_row .. first_row + v of the vocabulary. The row whose logical number is `padding_idx`
    (-1: none) gets no gradient.
    """
    local = ids - first_row
    here = (local >= 0) & (local < weight.shape[0])
    padding = padding_idx - first_row
    inside = padding_idx >= 0 and 0 <= padding < weight.shape[0]  # -1 is torch's "none" as well
    rows = torch.ops.aten.embedding.default(weight, torch.where(here, local, 0), padding if inside else -1)
    return torch.where(here.unsqueeze(-1), rows, 0.0)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[m, k], [g, k, n], [g] -> [m, n]: rows of `a` by the matrix of their group. Group g ends before row ends[g];
    rows after the last group are zero.

    torch's kernel has no float64, and wants strides of 16 bytes, which a shard need not have.
    """
    aligned = all(t.is_contiguous() and t.shape[-1] * t.element_size() % 16 == 0 for t in (a, b))
    if aligned and a.dtype in (torch.bfloat16, torch.float16) and a.is_cuda:
        return torch._grouped_mm(a, b, offs=ends)
    bounds = [0, *ends.tolist()]
    rows = [a[start:end] @ b[g] for g, (start, end) in enumerate(pairwise(bounds))]
    return torch.cat([*rows, a[bounds[-1] :] @ b[0] * 0.0])
