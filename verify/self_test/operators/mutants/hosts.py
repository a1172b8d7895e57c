"""Operators with right backwards written by hand: what the backward bugs are planted in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from verify.self_test.operators.mutants.custom_backward import Gradients, Host

EPS = 1e-6


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w.T + b


def linear_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> Gradients:
    return g @ w, g.T @ x, g.sum(0)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def rms_norm_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor) -> Gradients:
    r = (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    gw = g * w
    return r * gw - x * r.pow(3) * (gw * x).mean(-1, keepdim=True), (g * x * r).sum(0)


def silu_backward(g: Tensor, _y: Tensor, x: Tensor) -> Gradients:
    s = torch.sigmoid(x)
    return (g * (s + x * s * (1 - s)),)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def softmax_backward(g: Tensor, y: Tensor, _x: Tensor) -> Gradients:
    return (y * (g - (g * y).sum(-1, keepdim=True)),)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def layer_norm_backward(g: Tensor, _y: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> Gradients:
    r = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    n = (x - x.mean(-1, keepdim=True)) * r
    gw = g * w
    gx = r * (gw - gw.mean(-1, keepdim=True) - n * (gw * n).mean(-1, keepdim=True))
    return gx, (g * n).sum(0), g.sum(0)


def swiglu(x: Tensor, u: Tensor) -> Tensor:
    return F.silu(x) * u


def swiglu_backward(g: Tensor, _y: Tensor, x: Tensor, u: Tensor) -> Gradients:
    return silu_backward(g * u, _y, x)[0], g * F.silu(x)


def squared_error(x: Tensor, t: Tensor) -> Tensor:
    return (x - t).pow(2).sum()


def squared_error_backward(g: Tensor, _y: Tensor, x: Tensor, t: Tensor) -> Gradients:
    return 2 * g * (x - t), -2 * g * (x - t)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


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
    Host(
        "matmul",
        "m k+, k+ n -> m n",
        torch.matmul,
        lambda g, y, x, w: (g @ w.T, x.T @ g),
        2,
    ),
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
