"""Convolution and pooling of a block of the rows of their result, from a whole input: their windows overlap.

The input is whole along the dims of the windows. A block of output rows reads the input rows below its windows, and
zeros (or, for a maximum, what loses every comparison) where those reach over an edge. So padding is written out, and
the operator itself runs without any. One entry per dim of the windows in every list; `before` is the padding in front,
`first` and `length` say which output rows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rows(x: Tensor, dim: int, first: int, length: int, fill: float = 0.0) -> Tensor:
    """x[first : first + length] along `dim`; rows before the first and after the last one are `fill`."""
    size = x.shape[dim]
    low, high = min(max(first, 0), size), min(max(first + length, 0), size)
    x = x.narrow(dim, low, max(high - low, 0))
    missing = (max(low - first, 0), max(first + length - max(high, low), 0))
    if high <= low:
        missing = (length, 0)
    if missing == (0, 0):
        return x
    pads = [0, 0] * (x.dim() - 1 - dim % x.dim()) + list(missing)
    return functional.pad(x, pads, value=fill)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows that slide over the last dims of a tensor, one entry per dim.

    kernel    rows that a window reads
    stride    rows between two windows
    dilation  rows between two that one window reads
    before    rows of padding in front
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    before: Sequence[int]


def below(x: Tensor, windows: Windows, first: Sequence[int], length: Sequence[int], fill: float = 0.0) -> Tensor:
    """Return the rows of `x` that the windows of the output rows first .. first + length read, along its last dims."""
    count = len(windows.kernel)
    for i in range(count):
        stride = windows.stride[i]
        reach = (length[i] - 1) * stride + windows.dilation[i] * (windows.kernel[i] - 1) + 1
        x = rows(x, i - count, first[i] * stride - windows.before[i], reach, fill)
    return x


def conv_window(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    first: Sequence[int],
    length: Sequence[int],
) -> Tensor:
    """Compute a convolution's output rows first .. first + length along each dim of its windows."""
    convolution: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(stride) - 1]
    read = below(x, Windows(weight.shape[2:], stride, dilation, before), first, length)
    return convolution(read, weight, bias, list(stride), 0, list(dilation), groups)


def conv_transpose_window(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    first: Sequence[int],
    length: Sequence[int],
) -> Tensor:
    """Compute a transposed convolution's output rows first .. first + length along each dim of its windows.

    Input row i reaches the output rows from i * stride - before on: the rows that reach the block are spread without
    padding, and the block is cut out of what they give.
    """
    transposed: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
    count = len(stride)
    cuts = []
    for i in range(count):
        start = first[i] + before[i]
        low = (start - dilation[i] * (weight.shape[i - count] - 1)) // stride[i]
        high = (start + length[i] - 1) // stride[i]
        x = rows(x, i - count, low, high - low + 1)
        cuts.append(start - low * stride[i])
    y = transposed[count - 1](x, weight, bias, list(stride), 0, 0, groups, list(dilation))
    for i in range(count):
        short = cuts[i] + length[i] - y.shape[i - count]
        if short > 0:  # rows that no input row reaches (dilation, output padding): they have the bias alone
            y = _longer(y, i - count, short, bias, count)
        y = y.narrow(i - count, cuts[i], length[i])
    return y


def _longer(y: Tensor, dim: int, short: int, bias: Tensor | None, count: int) -> Tensor:
    shape = list(y.shape)
    shape[dim] = short
    more = y.new_zeros(shape)
    return torch.cat([y, more if bias is None else more + bias.reshape(-1, *[1] * count)], dim)


def avg_pool_window(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    before: Sequence[int],
    divisor: int,
    first: Sequence[int],
    length: Sequence[int],
) -> Tensor:
    """Compute the sum of each window over `divisor`, for the output rows first .. first + length."""
    pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(kernel) - 1]
    read = below(x, Windows(kernel, stride, [1] * len(kernel), before), first, length)
    return pool(read, list(kernel), list(stride)) * (math.prod(kernel) / divisor)


def max_pool_window(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    before: Sequence[int],
    dilation: Sequence[int],
    first: Sequence[int],
    length: Sequence[int],
) -> Tensor:
    """Compute the maximum of each window, for the output rows first .. first + length."""
    pool: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(kernel) - 1]
    read = below(x, Windows(kernel, stride, dilation, before), first, length, -math.inf)
    return pool(read, list(kernel), list(stride), 0, list(dilation))
