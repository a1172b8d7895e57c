"""Functions with backwards written by hand, right ones, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from op_registry.spec import OperatorSpec

from verify import Verdict
from verify.evidence.inputs.concrete_call import ConcreteCall, make_call
from verify.operators.audit.check_handwritten_derivative import check_derivative
from verify.operators.audit.watch_effects_on_tensors import Probed
from verify.results.finding import Finding

Function = Callable[..., Any]
SEEDS = range(20)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(
    function: Function, *args: Any, gradient: Any = "derivative", **kwargs: Any
) -> tuple[OperatorSpec, ConcreteCall]:
    spec = OperatorSpec("op", "", gradient=gradient, target=function)
    return spec, make_call("op", args, kwargs)


def check(function: Function, *args: Any, seed: int = 0, always: bool = False, **kwargs: Any) -> Probed:
    return check_derivative(*call(function, *args, **kwargs), seed, always=always)


def finding(function: Function, *args: Any, seed: int = 0, always: bool = False) -> Finding:
    probed = check(function, *args, seed=seed, always=always)
    assert [c.verdict for c in probed.checks] == [Verdict.REFUTED]
    assert [f.code for f in probed.findings] == ["gradient_is_not_derivative"]
    return probed.findings[0]


def assert_right(function: Function, *args: Any, always: bool = False) -> None:
    for seed in SEEDS:
        checks, findings, _ = check(function, *args, seed=seed, always=always)
        assert not findings
        assert [c.verdict for c in checks] == [Verdict.TESTED_EXACT], checks
        assert checks[0].count >= 2


EPS = 1e-6


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        inner = g * weight
        return inner * scale - x * scale**3 * (inner * x).mean(-1, keepdim=True), (g * x * scale).sum(0)


class ForgetsTheMean(RmsNorm):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        return g * weight * scale, (g * x * scale).sum(0)


class Kinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu() + x.abs()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x > 0) + g * x.sign()


class Largest(torch.autograd.Function):
    """Integers beside floating numbers, and an output without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, places = x[ids].max(-1)
        ctx.save_for_backward(ids, places)
        ctx.shape = x.shape
        norm = x.norm()
        ctx.mark_non_differentiable(places, norm)
        return values, places, norm

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_unused: Tensor) -> Any:
        ids, places = ctx.saved_tensors
        gradient = torch.zeros(ctx.shape, dtype=g.dtype)
        gradient.index_put_((ids, places), g, accumulate=True)
        return gradient, None


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values, order = x.sort(-1)
        ctx.save_for_backward(order)
        return values.clamp(-0.5, 0.8)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, order, g * ctx.inside)


class Clamped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        x, ctx.low, ctx.high = inputs
        ctx.save_for_backward(x.t())  # not contiguous

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * ((x > ctx.low) & (x < ctx.high)).t(), None, None


class Turned(torch.autograd.Function):
    """Complex, with a rule for vmap."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w.conj(), g * x.conj()

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, x: Tensor, w: Tensor) -> Any:
        return x * w, 0


class Optional(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.biased = bias is not None
        ctx.set_materialize_grads(False)
        return (x * 2 if bias is None else x * 2 + bias), x.sum(0)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Any:
        found = torch.zeros(()).double()
        if first is not None:
            found = found + first * 2
        if second is not None:
            found = found + second
        return found.expand(12, 5), first.sum(0) if ctx.biased and first is not None else None


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        keep = (torch.rand_like(x) > 0.5).to(x.dtype)
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (keep,) = ctx.saved_tensors
        return g * keep


def weighted_sum(tensors: list[Tensor], scale: float = 2.0) -> Tensor:
    return Kinked.apply(torch.stack([t * (i + 1) for i, t in enumerate(tensors)]).sum(0)) * scale  # type: ignore[no-any-return]
