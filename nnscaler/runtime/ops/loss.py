"""Losses and means whose sums may be spread over ranks: operators that divide by logical counts, not local ones.

Cross entropy is four operators so that its classes can be split: the maximum and the sum of exponentials are reduced
over the blocks of classes, and so is the logit of the label, which lies in one block. The whole loss of logits [N, C]
is ce_tail(ce_sumexp(logits, m), m, ce_pick(logits, labels, i), labels, i) with m = ce_max(logits). Half precision is
computed in float32, as torch's own cross entropy does inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype in which sums are made."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def ce_max(logits: Tensor) -> Tensor:
    """[N, C] -> [N]: the largest logit of each row; without gradient, which cancels in the loss."""
    with torch.no_grad():
        return wide(logits.detach().amax(1))


def ce_sumexp(logits: Tensor, maximum: Tensor) -> Tensor:
    """[N, C], [N] -> [N]: the sum over classes of exp(logit - maximum)."""
    return (wide(logits) - maximum.unsqueeze(1)).exp_().sum(1)  # in place: logits are the largest tensors of a model


def ce_pick(
    logits: Tensor, labels: Tensor, ignore_index: int, first_class: int = 0, classes: int | None = None
) -> Tensor:
    """[N, C], [N] -> [N]: the logit of the label; 0 where the label is ignored or not in this block of classes, which
    begins at `first_class`, of `classes` in all. Raises for a label that is none of the classes, as torch's does."""
    local, counts = labels - first_class, labels != ignore_index
    check_indices(torch.where(counts, labels, 0), logits.shape[1] if classes is None else classes, "label")
    here = counts & (local >= 0) & (local < logits.shape[1])
    return torch.where(here, wide(_picked(logits, torch.where(here, local, 0).unsqueeze(1))).squeeze(1), 0.0)


def _picked(logits: Tensor, index: Tensor) -> Tensor:
    """[N, C], [N, 1] -> [N, 1]: gather along classes."""
    if torch.compiler.is_compiling():
        # Loops over all classes are there anyway, and backward makes no tensor of the logits' size for it.
        classes = torch.arange(logits.shape[1], device=logits.device)
        return torch.where(classes == index, logits, 0.0).sum(1, keepdim=True)
    return cast(Tensor, _Pick.apply(logits, index))


def check_indices(indices: Tensor, size: int, what: str) -> None:
    """Raise for an index that is not in range(size); on a device when it comes to it, as torch's operators do."""
    torch._assert_async(((indices >= 0) & (indices < size)).all(), f"a {what} is not in range({size})")


class _Pick(torch.autograd.Function):
    """Gather along classes. Torch's own keeps the logits for backward, where none is read."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.classes = logits.shape[1]
        return logits.gather(1, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(gradient.shape[0], ctx.classes).scatter_(1, index, gradient), None


def ce_tail(sumexp: Tensor, maximum: Tensor, picked: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """[N] each -> (): the sum over rows that count of log(sumexp) + maximum - picked."""
    return torch.where(labels != ignore_index, sumexp.log() + maximum - picked, 0.0).sum()


def ce_count(labels: Tensor, ignore_index: int) -> Tensor:
    """[N] -> (), int64: the number of rows that count."""
    return (labels != ignore_index).sum()


def ce_weight(labels: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """[N], [C] -> (): the sum of the weights of the labels that count."""
    counts = labels != ignore_index
    return torch.where(counts, weight[torch.where(counts, labels, 0)], 0.0).sum()


def mean_over(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """sum(x, dim) / count, where `count` is the logical number of elements summed. `dim` None or [] is every dim."""
    dims = list(dim) if dim else list(range(x.dim()))
    return torch.sum(x, dims, keepdim, dtype=dtype) / count


def mean_of(loss: str, count: int, *args: Any, **kwargs: Any) -> Tensor:
    """aten.<loss>(*args, **kwargs) / count, where `args` ask for the sum of the loss."""
    return getattr(torch.ops.aten, loss).default(*args, **kwargs) / count


def ctc_mean(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
    count: int,
) -> Tensor:
    """[T, n, C], [n, S], [n], [n] -> (): the sum over samples of their loss by target length, / `count`."""
    losses = torch.ops.aten.ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    return (losses / target_lengths.clamp(min=1)).sum() / count
