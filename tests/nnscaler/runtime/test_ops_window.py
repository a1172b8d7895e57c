"""A block of rows of operators with overlapping windows is what it is in the whole, gradients too."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nnscaler.runtime import ops

Block = Callable[[list[int], list[int]], Tensor]
Drawn = tuple[Tensor, Tensor, Block]


def _x(draw: random.Random) -> Tensor:
    return torch.randn(2, 4, draw.randint(1, 11), dtype=torch.float64, requires_grad=True)


def _bias(draw: random.Random) -> Tensor | None:
    return torch.randn(6, dtype=torch.float64) if draw.random() < 0.5 else None


def _conv(draw: random.Random) -> Drawn:
    x, k, s, d, bias = _x(draw), draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3), _bias(draw)
    p, w = draw.randint(0, d * (k - 1)), torch.randn(6, 2, k, dtype=torch.float64)
    whole = functional.conv1d(x, w, bias, s, p, d, 2)
    return x, whole, lambda first, length: ops.conv_window(x, w, bias, [s], [p], [d], 2, first, length)


def _conv_transpose(draw: random.Random) -> Drawn:
    x, k, s, d, bias = _x(draw), draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3), _bias(draw)
    p, w = draw.randint(0, min(3, d * (k - 1))), torch.randn(4, 3, k, dtype=torch.float64)
    whole = functional.conv_transpose1d(x, w, bias, s, p, draw.randint(0, max(s, d) - 1), 2, d)
    return x, whole, lambda first, length: ops.conv_transpose_window(x, w, bias, [s], [p], [d], 2, first, length)


def _max_pool(draw: random.Random) -> Drawn:
    x, k, s = _x(draw), draw.randint(1, 4), draw.randint(1, 4)
    p = draw.randint(0, k // 2)
    d = 1 if p else draw.randint(1, 3)
    whole = functional.max_pool1d(x, k, s, p, d, draw.random() < 0.5)
    return x, whole, lambda first, length: ops.max_pool_window(x, [k], [s], [p], [d], first, length)


def _avg_pool(draw: random.Random) -> Drawn:
    x, k, s = _x(draw), draw.randint(1, 4), draw.randint(1, 4)
    p = draw.randint(0, k // 2)
    whole = functional.avg_pool1d(x, k, s, p)
    return x, whole, lambda first, length: ops.avg_pool_window(x, [k], [s], [p], k, first, length)


@pytest.mark.parametrize("operator", [_conv, _conv_transpose, _max_pool, _avg_pool])
def test_a_block_of_rows(operator: Callable[[random.Random], Drawn]) -> None:
    draw, checked = random.Random(0), 0
    torch.manual_seed(0)
    for _ in range(300):
        try:
            x, whole, block = operator(draw)
        except RuntimeError:  # the input is shorter than a window
            continue
        if not whole.shape[-1]:
            continue
        first = draw.randint(0, whole.shape[-1] - 1)
        length = draw.randint(1, whole.shape[-1] - first)
        part, wanted = block([first], [length]), whole[..., first : first + length]
        torch.testing.assert_close(part, wanted)
        cotangent = torch.randn_like(part)
        found, right = (torch.autograd.grad(y, x, cotangent)[0] for y in (part, wanted))
        torch.testing.assert_close(found, right)
        checked += 1
    assert checked > 150
