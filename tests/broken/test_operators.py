"""Wrong operators and wrong claims about right ones: each is refuted, with its cause and the way out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import nnscaler
import verify
from nnscaler.errors import AnnotationError
from tests.sampling import every
from verify.results.finding import Finding
from verify.results.report import Report


def refuted(report: Report, code: str) -> Finding:
    """The finding of this code; the report is a refutation."""
    assert report.exit_code == 1, report.to_json()
    found = [f for f in report.findings if f.code == code]
    assert found, report.to_json()
    return found[0]


def tanh_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def relu_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def transposed_convolution(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv_transpose1d(x, w, b)


def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def packed_heads(x: Tensor, h: int) -> Tensor:
    """Scales every head: the head is the inner factor here."""
    return x.unflatten(-1, (-1, h)).softmax(-2).flatten(-2)


CLAIMS: list[tuple[Callable[..., Any], str, str, str]] = [
    # operator, the claim, the identifier that is wrong, the annotation that is right
    (tanh_product, "m k+, k+ n -> m n", "k", "m k^, k^ n -> m n"),
    (relu_product, "m k+, k+ n -> m n", "k", "m k^, k^ n -> m n"),
    (linear, "m k+, n k+, n -> m n", "k", "m k+, n k+, +n -> m n"),
    (softmax, "a b -> a b", "b", "a b^ -> a b^"),
    (mean, "a b+ -> a", "b", "a b^ -> a"),
    (transposed_convolution, "b i+ l^, i+ o 3, o -> b o m^", "i", "b i+ l^, i+ o 3, +o -> b o m^"),
    (cumulative, "a b -> a b", "b", "a b^ -> a b^"),
    (packed_heads, "a (h d^) -> a (h d^)", "h", "a (d^ h) -> a (d^ h)"),
]


@pytest.mark.parametrize(
    ("operator", "claim", "identifier", "right"), every(3, CLAIMS), ids=lambda v: getattr(v, "__name__", v)
)
def test_a_wrong_claim_is_refuted_with_the_right_one(
    operator: Callable[..., Any], claim: str, identifier: str, right: str
) -> None:
    finding = refuted(verify.verify_op(operator, annotation=claim), "annotation_wrong")
    assert finding.counter_example["identifier"] == identifier
    assert f'"{right}"' in str(finding.help)
    assert verify.verify_op(operator, annotation=right).exit_code == 0


def test_an_unmarked_sum_is_refused_at_registration() -> None:
    with pytest.raises(AnnotationError, match=r"m k\+, k\+ n -> m n"):
        nnscaler.register_op("m k, k n -> m n", name="broken_unmarked_again")(tanh_product)


class ForgetsTerm(torch.autograd.Function):
    """RMS normalisation whose backward forgets that the mean depends on every element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, w, scale)
        return x * scale * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w, scale = ctx.saved_tensors
        return gradient * w * scale, (gradient * x * scale).sum(0)


class OnesOnly(torch.autograd.Function):
    """Its backward is right for a cotangent of all ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x + 0 * gradient


class NoWeight(torch.autograd.Function):
    """Returns None for a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return gradient * w, None


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it had not."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    ("function", "annotation"),
    [(ForgetsTerm, "a n^, n^ -> a n^"), (OnesOnly, "a b -> a b"), (NoWeight, "a b, b -> a b")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_backward_that_is_not_the_derivative(function: Any, annotation: str) -> None:
    finding = refuted(verify.verify_op(function.apply, annotation=annotation), "gradient_is_not_derivative")
    assert function.__name__ in str(finding)


def test_a_straight_through_estimator_is_a_note() -> None:
    refuted(verify.verify_op(StraightThrough.apply, annotation="a b -> a b"), "gradient_is_not_derivative")
    registered = nnscaler.register_op("a b -> a b", name="broken_straight_through", gradient="custom")(StraightThrough)
    report = verify.verify_op(registered)
    assert report.exit_code == 0, report.to_json()
    assert any("derivative" in note for note in report.notes)


def mutates(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.data.mul_(2)
    return x * 2


def draws(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def draws_elsewhere(x: Tensor) -> Tensor:
    return x * random.random()


def aborts(x: Tensor) -> Tensor:
    if x.shape[0] == 6:
        os.abort()
    return x * 2


def test_an_operator_that_changes_its_input() -> None:
    refuted(verify.verify_op(mutates, annotation="a b -> a b"), "input_mutated")


@pytest.mark.parametrize("operator", [draws, draws_elsewhere])
def test_an_operator_that_draws_random_numbers(operator: Callable[..., Any]) -> None:
    report = verify.verify_op(operator, annotation="a b -> a b")
    assert not report.verdict.passes
    assert {"random_operator", "not_repeatable"} & {f.code for f in report.findings}


def test_an_operator_that_ends_the_process() -> None:
    report = verify.verify_op(aborts, annotation="a b -> a b")
    finding = next(f for f in report.findings if f.code == "operator_died")
    assert not report.verdict.passes
    assert "split a in 2" in str(finding.counter_example)
