"""Calls to test common built-in operators with: those whose annotation depends on the arguments.

Sizes divide by 6 where a dim can be split, and differ from dim to dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]


def _floats(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


SAMPLES: Mapping[str, Callable[[], list[Arguments]]] = MappingProxyType(
    {
        # matmul
        "aten.linear.default": lambda: [
            (_floats(6, 5, 12), _floats(18, 12), _floats(18)),
            (_floats(6, 12), _floats(18, 12)),
        ],
        "aten.matmul.default": lambda: [
            (_floats(6, 12), _floats(12, 18)),
            (_floats(6, 5, 12), _floats(6, 12, 18)),
            (_floats(6, 5, 12), _floats(12, 18)),
        ],
        "aten.addmm.default": lambda: [(_floats(18), _floats(6, 12), _floats(12, 18))],
        "aten.bmm.default": lambda: [(_floats(6, 5, 12), _floats(6, 12, 18))],
        "aten.mm.default": lambda: [(_floats(6, 12), _floats(12, 18))],
        # elementwise, with broadcasting
        "aten.add.Tensor": lambda: [(_floats(6, 12), _floats(6, 12)), (_floats(6, 12), _floats(12)), (_floats(6), 2.0)],
        "aten.sub.Tensor": lambda: [(_floats(6, 12), _floats(6, 1)), (_floats(6, 12), 1.0)],
        "aten.mul.Tensor": lambda: [(_floats(6, 12), _floats(6, 12)), (_floats(6, 12), _floats(1, 12))],
        "aten.div.Tensor": lambda: [(_floats(6, 12), _floats(6, 12).abs() + 1)],
        "aten.where.self": lambda: [(_floats(6, 12) > 0, _floats(6, 12), _floats(12))],
        "aten.masked_fill.Scalar": lambda: [(_floats(6, 12), _floats(6, 12) > 0, -1.0)],
        # normalisation and reductions
        "aten.softmax.int": lambda: [(_floats(6, 5, 12), -1), (_floats(6, 5, 12), 1)],
        "aten.log_softmax.int": lambda: [(_floats(6, 12), -1)],
        "aten.layer_norm.default": lambda: [(_floats(6, 12, 5), (5,), _floats(5), _floats(5), 1e-5)],
        "aten.group_norm.default": lambda: [(_floats(6, 12, 5), 6, _floats(12), _floats(12))],
        "aten.sum.dim_IntList": lambda: [(_floats(6, 12, 5), [1]), (_floats(6, 12), [0], True)],
        "aten.sum.default": lambda: [(_floats(6, 12),)],
        "aten.mean.dim": lambda: [(_floats(6, 12, 5), [-1]), (_floats(6, 12), [0], True)],
        "aten.amax.default": lambda: [(_floats(6, 12), [1])],
        "aten.cumsum.default": lambda: [(_floats(6, 12), 1)],
        # attention
        "aten.scaled_dot_product_attention.default": lambda: [
            (_floats(6, 12, 5, 7), _floats(6, 12, 9, 7), _floats(6, 12, 9, 18)),
            (_floats(6, 12, 5, 7), _floats(6, 12, 5, 7), _floats(6, 12, 5, 18), None, 0.0, True),
        ],
        # shapes
        "aten.view.default": lambda: [(_floats(6, 12, 5), [6, 60]), (_floats(6, 36), [6, 12, 3])],
        "aten.reshape.default": lambda: [(_floats(6, 12, 5), [72, 5]), (_floats(6, 36), [6, 12, -1])],
        "aten.transpose.int": lambda: [(_floats(6, 12, 5), 1, 2)],
        "aten.permute.default": lambda: [(_floats(6, 12, 18), [2, 0, 1])],
        "aten.expand.default": lambda: [(_floats(6, 1, 12), [6, 18, 12])],
        "aten.unsqueeze.default": lambda: [(_floats(6, 12), 1)],
        "aten.squeeze.dim": lambda: [(_floats(6, 1, 12), 1)],
        "aten.flatten.using_ints": lambda: [(_floats(6, 12, 5), 1)],
        "aten.cat.default": lambda: [([_floats(6, 12), _floats(6, 12)], 0), ([_floats(6, 12), _floats(6, 18)], 1)],
        "aten.stack.default": lambda: [([_floats(6, 12), _floats(6, 12)], 1)],
        "aten.split_with_sizes.default": lambda: [(_floats(6, 36), [12, 24], 1)],
        "aten.slice.Tensor": lambda: [(_floats(6, 12), 1, 2, 7)],
        "aten.select.int": lambda: [(_floats(6, 12, 5), 2, 3)],
        # index
        "aten.embedding.default": lambda: [(_floats(18, 12), _integers(18, 6, 5))],
        "aten.gather.default": lambda: [(_floats(6, 12), 1, _integers(12, 6, 5))],
        "aten.index_select.default": lambda: [(_floats(6, 12), 1, _integers(12, 5))],
        # convolution and pooling
        "aten.conv2d.default": lambda: [(_floats(6, 12, 7, 9), _floats(18, 12, 3, 3), _floats(18), [1, 1], [1, 1])],
        "aten.max_pool2d.default": lambda: [(_floats(6, 12, 8, 8), [2, 2])],
    }
)
