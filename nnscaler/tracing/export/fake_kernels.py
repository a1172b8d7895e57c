"""Shapes of operators whose fake kernel in torch refuses what the real one computes.

`_ctc_loss`: the table of path sums that it also returns is as wide as the longest target. Nothing that a model calls
sees that table: for export it may have any width.
`_grouped_mm`: the fake kernel asks for bfloat16, which GPUs of one kind need; float32 and float16 run on others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_impls


@contextmanager
def more_fake_kernels() -> Iterator[None]:
    """While open, these operators can be exported."""
    aten = torch.ops.aten
    kernels: dict[Any, Any] = {aten._ctc_loss.default: _ctc_loss, aten._ctc_loss.Tensor: _ctc_loss}
    kernels[aten._grouped_mm.default] = _grouped_mm
    with patch.dict(fake_impls.op_implementations_dict, kernels):
        yield


def _ctc_loss(mode: Any, _operator: Any, log_probs: Tensor, targets: Tensor, *_rest: Any, **_named: Any) -> Any:
    """(loss, table of path sums) for `log_probs` (time, batch, classes), or (time, classes) without a batch."""
    batch = log_probs.shape[1:2] if log_probs.ndim == 3 else ()
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty((*batch, log_probs.shape[0], 2 * targets.shape[-1] + 1))


def _grouped_mm(mode: Any, _operator: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *_rest: Any) -> Any:
    """(m, k) or (g, m, k) times (k, n) or (g, k, n): a dim that all groups share is summed over, or cut by `offs`."""
    groups: tuple[int, ...] = (a.shape[0],) if a.ndim == 3 else (b.shape[0],) if b.ndim == 3 else ()
    if a.ndim != b.ndim:
        groups = ()
    elif a.ndim == 2 and offs is not None:
        groups = (offs.shape[0],)
    with mode:
        return a.new_empty((*groups, a.shape[-2], b.shape[-1]))
