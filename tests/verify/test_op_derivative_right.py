"""The second oracle: right backwards pass under every seed, whatever they look like; a right one is linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.annotation.parser import parse

from tests.verify.backwards import (
    SEEDS,
    Clamped,
    Dropped,
    Function,
    Kinked,
    Largest,
    Optional,
    RmsNorm,
    Turned,
    assert_right,
    check,
    finding,
    normal,
    weighted_sum,
)
from verify import Verdict
from verify.evidence.inputs.draw_calls import choose_sizes, from_annotation
from verify.evidence.verify_op_options import KINDS
from verify.operators.audit.check_handwritten_derivative import check_derivative
from verify.self_test.operators.mutants.mutant import spec_of
from verify.self_test.operators.mutants.right_backwards_and_mistakes import HOSTS, with_backward


def test_the_right_norm() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return RmsNorm.apply(x, weight)  # type: ignore[no-any-return]

    assert_right(norm, normal(12, 8), normal(8))


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: h.name)
def test_right_hosts(host: Any) -> None:
    spec = spec_of(host.name, host.annotation, host.right)
    sizes = choose_sizes(parse(host.annotation), (), "distinct")
    for seed in SEEDS:
        for kind in (KINDS[seed % len(KINDS)],):
            concrete = from_annotation(spec, sizes, kind, torch.Generator().manual_seed(seed))
            probed = check_derivative(spec, concrete, seed)
            assert [c.verdict for c in probed.checks] == [Verdict.TESTED_EXACT], (seed, kind, probed)


COMPLEX = torch.complex(normal(4, 3), normal(4, 3, seed=1))
RIGHT: list[tuple[str, Function, tuple[Any, ...]]] = [
    ("kinks", Kinked.apply, (normal(12, 5),)),
    ("kinks at the given values", Kinked.apply, (torch.zeros(6, 4),)),
    ("maximum and ids", Largest.apply, (normal(7, 5), torch.tensor([0, 3, 3, 6]))),
    ("one output of three", lambda x, ids: Largest.apply(x, ids)[0], (normal(7, 5), torch.tensor([0, 3, 3, 6]))),
    ("clamp, setup_context", lambda x: Clamped.apply(x, -0.5, 0.8), (normal(12, 5),)),
    ("complex, vmap", Turned.apply, (COMPLEX, COMPLEX.flip(0))),
    (
        "complex and real",
        lambda x, w: Turned.apply(torch.complex(x, w), torch.complex(w, x)).abs(),
        (normal(4), normal(4, seed=2)),
    ),
    ("no optional input", lambda x, b=None: Optional.apply(x, b), (normal(12, 5), None)),
    ("an optional input", lambda x, b=None: Optional.apply(x, b), (normal(12, 5), normal(5))),
    ("some outputs", lambda x, b=None: Optional.apply(x, b)[1], (normal(12, 5),)),
    ("a list", weighted_sum, ([normal(6, 2), normal(6, 2, seed=1)],)),
    ("random numbers", Dropped.apply, (normal(12, 5),)),
    (
        "large values masked",
        lambda x, m: Kinked.apply(x) + m,
        (normal(4, 4), torch.full((4, 4), -1e9).double().triu(1)),
    ),
    (
        "infinite mask",
        lambda x, m: (Kinked.apply(x) + m).softmax(-1),
        (normal(4, 4), torch.full((4, 4), -torch.inf).double().triu(1)),
    ),
    ("small values", lambda x: Kinked.apply(x * 1e-4), (normal(4, 4) * 1e-3,)),
    ("one number", Kinked.apply, (torch.tensor(1.5).double(),)),
]


@pytest.mark.parametrize(("function", "args"), [r[1:] for r in RIGHT], ids=[r[0] for r in RIGHT])
def test_right_backwards(function: Function, args: tuple[Any, ...]) -> None:
    assert_right(function, *args)


def huber(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 100, 0.5 * x * x, 100 * (x.abs() - 50))


# piecewise, with numbers that lie far from the given inputs; what is right on both sides of each passes
FAR: list[tuple[str, Function, tuple[Any, ...]]] = [
    (
        "softplus",
        with_backward(
            lambda x: F.softplus(x, threshold=20), lambda g, y, x: (torch.where(x > 20, g, g * x.sigmoid()),)
        ),
        (normal(6, 5),),
    ),
    (
        "clamp",
        with_backward(lambda x: x.clamp(-1000, 1000), lambda g, y, x: (g * (x.abs() < 1000),)),
        (normal(6, 5),),
    ),
    ("huber", with_backward(huber, lambda g, y, x: (g * x.clamp(-100, 100),)), (normal(6, 5),)),
    (
        "steps of a quantiser",
        with_backward(lambda x: (x * 127).round() / 127 + x, lambda g, y, x: (g.clone(),)),
        (normal(6, 5),),
    ),
    ("exp", with_backward(lambda x: x.clamp(max=88).exp(), lambda g, y, x: (g * y * (x < 88),)), (normal(6, 5),)),
    ("exp without bound", with_backward(lambda x: 700 * x.exp(), lambda g, y, x: (g * y,)), (normal(3, 2),)),
    (
        "decay of a decay, of which no autograd has a number either where the inner one overflows",
        with_backward(lambda x, w: x * (-w.exp()).exp(), lambda g, y, x, w: (g * (-w.exp()).exp(), -g * y * w.exp())),
        (normal(6, 5), normal(6, 5, seed=1)),
    ),
    ("tanh", with_backward(lambda x: 50 * x.tanh(), lambda g, y, x: (g * (50 - y * y / 50),)), (normal(6, 5),)),
    (
        "sine",
        with_backward(lambda x: (x * 7000).sin(), lambda g, y, x: (g * 7000 * (x * 7000).cos(),)),
        (normal(6, 5),),
    ),
    (
        "masked softmax",
        with_backward(
            lambda x: x.masked_fill(torch.ones(5, 5).triu(1).bool(), -1e4).softmax(-1),
            lambda g, y, x: (y * (g - (g * y).sum(-1, keepdim=True)) * torch.ones(5, 5).tril(),),
        ),
        (normal(5, 5),),
    ),
    (
        "positive only",
        with_backward(lambda x: (x / 40).log(), lambda g, y, x: (g / x,)),
        (normal(6, 5).abs() + 0.5,),
    ),
    (
        "product of two, clamped",
        with_backward(
            lambda x, w: (x * w).clamp(max=30.0),
            lambda g, y, x, w: (g * w * (x * w < 30), g * x * (x * w < 30)),
        ),
        (normal(6, 5), normal(6, 5, seed=1)),
    ),
]


@pytest.mark.parametrize(("function", "args"), [r[1:] for r in FAR], ids=[r[0] for r in FAR])
def test_right_backwards_beyond_the_numbers_in_their_code(function: Function, args: tuple[Any, ...]) -> None:
    for seed in SEEDS:
        checks, findings, _ = check(function, *args, seed=seed)
        assert not findings and all(c.verdict.passes for c in checks), (seed, findings)


OVERFLOWING = with_backward(F.softplus, lambda g, y, x: (g * x.exp() / (1 + x.exp()),))
BESIDE_A_DECAY = with_backward(  # the first column is excused: autograd has no number there either
    lambda x: torch.cat([(-x[:, :1].exp()).exp(), F.softplus(x[:, 1:])], 1),
    lambda g, y, x: (
        torch.cat([-g[:, :1] * y[:, :1] * x[:, :1].exp(), g[:, 1:] * x[:, 1:].exp() / (1 + x[:, 1:].exp())], 1),
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [OVERFLOWING, BESIDE_A_DECAY], ids=["alone", "beside a decay of a decay"])
def test_a_backward_that_overflows_where_its_forward_has_a_derivative(wrong: Function) -> None:
    found = finding(wrong, normal(6, 5)).counter_example
    assert found is not None and found["values"].startswith("about 1000") and found["found"].startswith("nan")


def test_built_in_derivatives_are_right() -> None:
    """torch's own: what the differences say about them tests the differences."""
    for function, inputs in (
        (lambda x, w: F.layer_norm(x, (8,), w), (normal(4, 8), normal(8))),
        (
            F.scaled_dot_product_attention,
            (normal(1, 2, 5, 4), normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2)),
        ),
        (lambda x: x.cumsum(0).max(0).values, (normal(6, 4),)),
        (lambda x: torch.fft.rfft(x).abs(), (normal(6, 8),)),
    ):
        assert_right(function, *inputs, always=True)


class TwoOutputs(torch.autograd.Function):
    """A model may use one of them alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(_: Any, g: Tensor | None, h: Tensor | None) -> Tensor | None:  # type: ignore[override]
        if h is None:
            return g  # half of it
        return h * 3 if g is None else g * 2 + h * 3


class RightForEach(TwoOutputs):
    @staticmethod
    def backward(_: Any, g: Tensor | None, h: Tensor | None) -> Tensor | None:  # type: ignore[override]
        return sum(factor * c for factor, c in ((2, g), (3, h)) if c is not None)  # type: ignore[return-value]


class RaisesForOne(TwoOutputs):
    @staticmethod
    def backward(_: Any, g: Tensor, h: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2 + h * 3


NOT_LINEAR = {
    "cut off": with_backward(lambda x: x * 2, lambda g, y, x: ((g * 2).clamp(-1e3, 1e3),)),
    "small ones left out": with_backward(lambda x: x * 2, lambda g, y, x: (torch.where(g.abs() < 1e-3, 0.0, 2 * g),)),
    "of half precision": with_backward(lambda x: x * 2, lambda g, y, x: ((g.half() * 2).to(g.dtype),)),
    "another for one output": TwoOutputs.apply,
}


@pytest.mark.parametrize("function", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_a_backward_that_is_not_linear_in_its_cotangents(function: Function) -> None:
    assert "is not linear in the gradients" in finding(function, normal(4, 3)).message


def test_right_backwards_are_linear_in_their_cotangents() -> None:
    assert_right(RightForEach.apply, normal(4, 3))
    assert_right(RaisesForOne.apply, normal(4, 3))
    assert_right(with_backward(lambda x: x * 2, lambda g, y, x: ((g.float() * 2).to(g.dtype),)), normal(4, 3))
