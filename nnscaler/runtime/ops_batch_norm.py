"""Batch norm in parts, so that the batch can be split: what is summed over it is reduced between the parts.

Batch norm of x [b, c, *] is batch_normalise(x, m, v, weight, bias, eps) with m = batch_mean(x, n) and v =
batch_variance(x, m, n), where n counts the logical b and *. Half precision is computed in float32, as torch
does inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _over_batch(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _of_channels(statistic: Tensor, x: Tensor) -> Tensor:
    """[c] to [c, 1, ...], which broadcasts against x [b, c, *]."""
    return statistic.reshape(-1, *(1 for _ in x.shape[2:]))


def batch_mean(x: Tensor, count: int) -> Tensor:
    """[b, c, *] -> [c]: the sum of each channel, over the logical number of its values."""
    return _wide(x).sum(_over_batch(x)) / count


def batch_variance(x: Tensor, mean: Tensor, count: int) -> Tensor:
    """[b, c, *], [c] -> [c]: the sum of squared distances from the mean, over the logical number of values."""
    return (_wide(x) - _of_channels(mean, x)).square().sum(_over_batch(x)) / count


def batch_normalise(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """[b, c, *], [c] each -> [b, c, *]: weight * (x - mean) / sqrt(variance + eps) + bias."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    y = (_wide(x) - _of_channels(mean, x)) * _of_channels(scale, x)
    return (y if bias is None else y + _of_channels(bias, x)).to(x.dtype)


def running_statistic(old: Tensor, now: Tensor, momentum: float, factor: float) -> Tensor:
    """[c], [c] -> [c]: old + momentum * (factor * now - old); without gradient, in the dtype of `old`."""
    return old.detach().lerp((now.detach() * factor).to(old.dtype), momentum)
