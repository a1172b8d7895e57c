"""Operators of users that do something else on some values: said to be cut along dim 0, and wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Operator = Callable[[Tensor], Tensor]
LIMIT = 1e4


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def beyond_a_maximum(x: Tensor) -> Tensor:
    return centred(x) if x.max() > LIMIT else x * 1.0


def beyond_a_number(x: Tensor) -> Tensor:
    scale = 0.5 if float(x.detach().norm()) > 77.0 else 1.0
    return x * scale


def clipped_by_python(x: Tensor) -> Tensor:
    return x * min(1.0, 250.0 / (float(x.detach().norm()) + 1e-6))


def clipped_by_norm(x: Tensor) -> Tensor:
    return x * (500.0 / (x.norm() + 1e-6)).clamp(max=1.0)


def below_a_sum(x: Tensor) -> Tensor:
    return torch.where(x.sum() < -3000.0, x * 0.5, x)


def where_tiny(x: Tensor) -> Tensor:
    largest = x.abs().amax()
    return torch.where(largest < 1e-8, x / (largest + 1e-30), x)


def where_few_are_large(x: Tensor) -> Tensor:
    """Of 60 elements and less, one is a larger share than that."""
    return torch.where((x.abs() > 6.0).double().mean() > 0.005, x.clamp(-6, 6), x)


def where_one_stands_out(x: Tensor) -> Tensor:
    return torch.where(x.abs().max() > 20 * x.abs().mean(), x * 0.9, x)


def where_any_is_not_finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x).all(), x * 1.0, torch.zeros_like(x))


def where_all_are_equal(x: Tensor) -> Tensor:
    return centred(x) if bool((x == x.flatten()[0]).all()) else x * 1.0


def unless_values_cannot_be_read(x: Tensor) -> Tensor:
    """On the fake tensors of a proof they cannot."""
    try:
        largest = x.detach().abs().max().item()
    except Exception:  # noqa: BLE001 - as some code does to be compiled
        return x * 1.0
    return centred(x) if largest > LIMIT else x * 1.0


def unless_fake(x: Tensor) -> Tensor:
    return x * 1.0 if isinstance(x, FakeTensor) else beyond_a_maximum(x)


class ClippedGradient(torch.autograd.Function):
    """A backward that clips by the norm of all rows."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        largest = gradient.abs().max()
        return gradient * 2 if largest <= 100.0 else gradient * (200.0 / largest)


class GradientOrNothing(torch.autograd.Function):
    """A backward that gives nothing where any gradient is NaN."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 if bool(torch.isfinite(gradient).all()) else torch.zeros_like(gradient)


WRONG: tuple[Operator, ...] = (
    beyond_a_maximum,
    beyond_a_number,
    clipped_by_python,
    clipped_by_norm,
    below_a_sum,
    where_tiny,
    where_few_are_large,
    where_one_stands_out,
    where_any_is_not_finite,
    where_all_are_equal,
    unless_values_cannot_be_read,
    unless_fake,
    ClippedGradient.apply,
    GradientOrNothing.apply,
)


def each_large_element(x: Tensor) -> Tensor:
    return torch.where(x.abs() > LIMIT, x / 2, x)


def the_same_either_way(x: Tensor) -> Tensor:
    return x + x if x.mean() > LIMIT else x * 2.0


def refused_where_not_finite(x: Tensor) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise ValueError("not finite")
    return x * 2.0


def refused_where_marked(x: Tensor) -> Tensor:
    if x.flatten()[0] == 42.0:
        raise ValueError("marked")
    return x * 2.0


def sines(x: Tensor) -> Tensor:
    return (x * 3).sin() if x.abs().max() > LIMIT else x.mul(3).sin()


def rows_alone(x: Tensor) -> Tensor:
    return torch.stack([row / row.norm() if row.norm() > 3 else row for row in x])


def touching_all(x: Tensor) -> Tensor:
    """x for every number; what is not one reaches all rows by arithmetic, which decides nothing."""
    return x + 0 * x.sum()


RIGHT: tuple[Operator, ...] = (
    touching_all,
    each_large_element,
    the_same_either_way,
    refused_where_not_finite,
    refused_where_marked,
    sines,
)


def never_on_the_other_side(x: Tensor) -> Tensor:
    return centred(x) if x.flatten()[0] == 42.0 else x * 1.0


def in_a_narrow_window(x: Tensor) -> Tensor:
    return centred(x) if 123.4 < x.abs().max().item() < 123.6 else x * 1.0
