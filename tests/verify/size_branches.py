"""Operators of users that do something else from some size on: said to be cut along dim 0, and wrong there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor


def centred_from(size: int, dim: int = 0) -> Callable[[Tensor], Tensor]:
    """An operator that centres columns where a dim is longer than `size`, and else does nothing."""

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if x.shape[dim] > size else x * 1.0

    return centred


def centred_where_long(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] > 8 * x.shape[1] else x * 1.0


def centred_by_step(x: Tensor) -> Tensor:
    """Its trace is of one width alone."""
    for _ in range(1 if int(x.shape[1]) > 40 else 0):
        x = x - x.mean(0, keepdim=True)
    return x * 1.0


class WrongBackwardIfWide(torch.autograd.Function):
    """Right, but for its gradient where rows are longer than 40."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[1]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * (gradient - gradient.mean(0, keepdim=True)) if ctx.size > 40 else 2 * gradient


def as_of_library(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as if it stood in a package beside torch whose name begins as torch's, as torchvision's."""

    def moved(code: CodeType) -> CodeType:
        inner = tuple(moved(one) if isinstance(one, CodeType) else one for one in code.co_consts)
        return code.replace(co_filename=f"{Path(torch.__file__).parent}_of_others/ops.py", co_consts=inner)

    assert isinstance(function, FunctionType)
    return FunctionType(moved(function.__code__), function.__globals__, function.__name__)
