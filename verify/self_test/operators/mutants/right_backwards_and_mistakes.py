"""Right backwards written by hand, and the mistakes that make wrong ones of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verify.self_test.operators.mutants.mutant import Function
from verify.self_test.operators.right_operators import (
    EPS,
    attend,
    layer_norm,
    linear,
    rms_norm,
    softmax,
    squared_error,
    swiglu,
)

Gradients = Sequence[Tensor | None]
Backward = Callable[..., Gradients]  # (cotangent, output, *inputs) -> the gradient of every input


def with_backward(forward: Function, backward: Backward) -> Function:
    """Return the operator that computes `forward`, with this backward."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            output = forward(*inputs)
            ctx.save_for_backward(*inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            *inputs, output = ctx.saved_tensors
            return tuple(backward(cotangents[0], output, *inputs))

    apply: Function = Custom.apply

    def operator(*inputs: Tensor) -> Any:
        return apply(*inputs)

    return operator


@dataclass(frozen=True, slots=True)
class Host:
    """A differentiable operator with its right backward. `same`: two inputs of one shape."""

    name: str
    annotation: str
    forward: Function
    backward: Backward
    inputs: int
    same: tuple[int, int] | None = None

    @property
    def right(self) -> Function:
        """The operator, with the right backward."""
        return with_backward(self.forward, self.backward)

    def wrong(self, change: Callable[[Backward], Backward]) -> Function:
        """Return the operator, with its backward changed."""
        return with_backward(self.forward, change(self.backward))


def from_cotangent(function: Callable[[Tensor], Tensor]) -> Callable[[Backward], Backward]:
    """Change what the backward is given."""

    def change(backward: Backward) -> Backward:
        return lambda g, y, *inputs: backward(function(g), y, *inputs)

    return change


def on_gradient(
    number: int, function: Callable[[Tensor, Tensor, Tensor], Tensor | None]
) -> Callable[[Backward], Backward]:
    """Change one gradient that the backward returns: `function(gradient, cotangent, first input)`."""

    def change(backward: Backward) -> Backward:
        def changed(g: Tensor, y: Tensor, *inputs: Tensor) -> Gradients:
            found = list(backward(g, y, *inputs))
            gradient = found[number]
            assert gradient is not None
            found[number] = function(gradient, g, inputs[0])
            return found

        return changed

    return change


def swapped(first: int, second: int) -> Callable[[Backward], Backward]:
    """Return two gradients in each other's place."""

    def change(backward: Backward) -> Backward:
        def changed(g: Tensor, y: Tensor, *inputs: Tensor) -> Gradients:
            found = list(backward(g, y, *inputs))
            found[first], found[second] = found[second], found[first]
            return found

        return changed

    return change


def raw(x: Tensor) -> Tensor:
    """Read a tensor as a kernel does that assumes contiguous memory: the first `numel` numbers of its storage.

    Equal to `x` where it is contiguous. Nothing outside the tensor's storage is read.
    """
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() or not x.numel():
        return x
    flat = torch.as_strided(x, (min(room, x.numel()),), (1,), x.storage_offset())
    if flat.numel() < x.numel():
        flat = torch.cat([flat, flat.new_zeros(x.numel() - flat.numel())])
    return flat.view(x.shape)


def linear_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> Gradients:
    return g @ w, g.T @ x, g.sum(0)


def rms_norm_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor) -> Gradients:
    r = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    gw = g * w
    return r * gw - x * r.pow(3) * (gw * x).mean(-1, keepdim=True), (g * x * r).sum(0)


def silu_backward(g: Tensor, _y: Tensor, x: Tensor) -> Gradients:
    s = torch.sigmoid(x)
    return (g * (s + x * s * (1 - s)),)


def softmax_backward(g: Tensor, y: Tensor, _x: Tensor) -> Gradients:
    return (y * (g - (g * y).sum(-1, keepdim=True)),)


def layer_norm_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> Gradients:
    r = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    n = (x - x.mean(-1, keepdim=True)) * r
    gw = g * w
    gx = r * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
    return gx, (g * n).sum(0), g.sum(0)


def swiglu_backward(g: Tensor, _y: Tensor, x: Tensor, u: Tensor) -> Gradients:
    return silu_backward(g * u, _y, x)[0], g * F.silu(x)


def squared_error_backward(g: Tensor, _y: Tensor, x: Tensor, t: Tensor) -> Gradients:
    return 2 * g * (x - t), -2 * g * (x - t)


def attend_backward(g: Tensor, _y: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    gp = g @ v.transpose(-1, -2)
    gs = p * (gp - (gp * p).sum(-1, keepdim=True))
    return gs @ k, gs.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g


HOSTS: tuple[Host, ...] = (
    Host(
        "scale_shift",
        "a n, n, n -> a n",
        lambda x, w, b: x * w + b,
        lambda g, y, x, w, b: (g * w, (g * x).sum(0), g.sum(0)),
        3,
        (1, 2),
    ),
    Host("linear", "m k+, n k+, +n -> m n", linear, linear_backward, 3),
    Host("matmul", "m k+, k+ n -> m n", torch.matmul, lambda g, y, x, w: (g @ w.T, x.T @ g), 2),
    Host("rms_norm", "m n^, n^ -> m n^", rms_norm, rms_norm_backward, 2),
    Host("silu", "a b -> a b", F.silu, silu_backward, 1),
    Host("sigmoid", "a b -> a b", torch.sigmoid, lambda g, y, x: (g * y * (1 - y),), 1),
    Host("tanh", "a b -> a b", torch.tanh, lambda g, y, x: (g * (1 - y * y),), 1),
    Host("softmax", "m n^ -> m n^", softmax, softmax_backward, 1),
    Host("layer_norm", "m n^, n^, n^ -> m n^", layer_norm, layer_norm_backward, 3, (1, 2)),
    Host(
        "bmm",
        "b m k+, b k+ n -> b m n",
        torch.bmm,
        lambda g, y, x, w: (g @ w.transpose(1, 2), x.transpose(1, 2) @ g),
        2,
    ),
    Host("swiglu", "a b, a b -> a b", swiglu, swiglu_backward, 2, (0, 1)),
    Host("squared_error", "a+ b+, a+ b+ -> ()", squared_error, squared_error_backward, 2, (0, 1)),
    Host("weighted_sum", "m k+, k+ -> m", lambda x, v: x @ v, lambda g, y, x, v: (g[:, None] * v, x.T @ g), 2),
    Host("attend", "h q d^, h k^ d^, h k^ e -> h q e", attend, attend_backward, 3),
)
