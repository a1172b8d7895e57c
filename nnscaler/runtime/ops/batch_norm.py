"""Batch norm in parts, so that the batch can be split: what is summed over it is reduced between the parts.

Batch norm of x [b, c, *] is batch_normalise(x, m, v, weight, bias, eps) with m = batch_mean(x) and v =
batch_variance(x, m). On a shard both take `count`, the logical number of values of a channel. Half precision is
computed in float32, as torch does inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


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
    return _wide(x).sum(_over_batch(x)) / (count or _values(x))


def batch_variance(x: Tensor, mean: Tensor, count: int | None = None) -> Tensor:
    """[b, c, *], [c] -> [2, c]: squared distances from the mean, over the number of values and over one less."""
    squares = (_wide(x) - _of_channels(mean, x)).square().sum(_over_batch(x))
    count = count or _values(x)
    return torch.stack((squares / count, squares / max(count - 1, 1)))


def batch_normalise(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """[b, c, *], [c], [2, c], [c], [c] -> [b, c, *]: weight * (x - mean) / sqrt(variance[0] + eps) + bias."""
    scale = torch.rsqrt(variance[0] + eps)
    if weight is not None:
        scale = scale * weight
    y = (_wide(x) - _of_channels(mean, x)) * _of_channels(scale, x)
    return (y if bias is None else y + _of_channels(bias, x)).to(x.dtype)


def running_statistic(old: Tensor, now: Tensor, momentum: float) -> Tensor:
    """[c], [c] -> [c]: old + momentum * (now - old); without gradient, in the dtype of `old`."""
    return old.detach().lerp(now.detach().to(old.dtype), momentum)
