"""Operators whose annotations are wrong, registered under names that only these tests use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import nnscaler


@nnscaler.register_op("m k, k n^ -> m k", name="broken_product")
def product(x: Tensor, w: Tensor) -> Tensor:
    """`k` for `k+`: with a square `w` every size fits, and a sum over `k` is taken for a tensor cut along `k`."""
    return x @ w


@nnscaler.register_op("m k+, k+ n -> m n", name="broken_gate")
def gate(x: Tensor, w: Tensor) -> Tensor:
    """`k+` for `k^`: the terms of the sum are not the values of the gate."""
    return torch.sigmoid(x @ w)


@nnscaler.register_op("m k, k -> m k", name="broken_peak")
def peak(x: Tensor, w: Tensor) -> Tensor:
    """`k` for `k^`: the maximum is that of the shard."""
    return x / x.abs().amax(-1, keepdim=True) * w


@nnscaler.register_op("m k+, k+ n, n -> m n", name="broken_affine")
def affine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """`n` for `+n`: every rank adds the bias to its term of the sum."""
    return x @ w + b


@nnscaler.register_op("m k+, k+ -> m", name="broken_average")
def average(x: Tensor, w: Tensor) -> Tensor:
    """`k+` for `k^`: the divisor is that of the shard."""
    return (x * w).mean(-1)


@dataclass(frozen=True, slots=True)
class Wrong:
    """An operator, the identifier that is marked wrongly, and what the annotation should be. `code`: what verify-op
    finds; `shapes`: of its other tensors, beside one of [6, 12]."""

    operator: Callable[..., Tensor]
    identifier: str
    right: str
    shapes: tuple[tuple[int, ...], ...]
    code: str = "annotation_wrong"

    @property
    def name(self) -> str:
        return self.operator.__name__

    @property
    def operator_name(self) -> str:
        return f"broken_{self.name}"

    def plain(self, *tensors: Tensor) -> Tensor:
        """The function that was registered."""
        return self.operator(*tensors)


WRONG = (
    Wrong(product, "k", "m k+, k+ n -> m n", ((12, 12),), "annotation_does_not_fit"),
    Wrong(gate, "k", "m k^, k^ n -> m n", ((12, 10),)),
    Wrong(peak, "k", "m k^, k^ -> m k^", ((12,),)),
    Wrong(affine, "k", "m k+, k+ n, +n -> m n", ((12, 10), (10,))),
    Wrong(average, "k", "m k^, k^ -> m", ((12,),)),
)


class Uses(nn.Module):
    """A linear layer, then the operator, on as many tensors as it takes."""

    def __init__(self, operator: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.operator(self.first(x), *self.weights).square().mean()
