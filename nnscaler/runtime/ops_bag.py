"""Sums of rows of a table, or of one block of its rows."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_bag(
    weight: Tensor, ids: Tensor, scales: Tensor | None, padding_idx: int = -1, first_row: int | None = None
) -> Tensor:
    """[v, d], [b, l] -> [b, d]: per bag, the sum of the rows of its ids, times `scales` [b, l] where given.

    An id that is `padding_idx` (-1: none) does not count. With `first_row`, `weight` holds rows first_row ..
    first_row + v of the table, and ids elsewhere do not count.
    """
    counts = None if padding_idx < 0 else ids != padding_idx
    if first_row is not None:
        ids = ids - first_row
        here = (ids >= 0) & (ids < weight.shape[0])
        counts = here if counts is None else counts & here
        ids = torch.where(here, ids, 0)
    if counts is not None:
        scales = counts.to(weight.dtype) if scales is None else torch.where(counts, scales, 0.0)
    return torch.nn.functional.embedding_bag(ids, weight, mode="sum", per_sample_weights=scales)
