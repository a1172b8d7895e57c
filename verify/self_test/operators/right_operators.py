"""The corpus of right operators: functions that compute what an annotation says.

Wrong annotations are made of those that models compose (`corpus`), wrong backwards are planted in the differentiable
ones (`hosts`), and the other operator mutants have some of them as their twins.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w.T + b


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * w


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def swiglu(x: Tensor, u: Tensor) -> Tensor:
    return F.silu(x) * u


def squared_error(x: Tensor, t: Tensor) -> Tensor:
    return (x - t).pow(2).sum()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.gelu(x @ w1 + b1) @ w2 + b2


def _heads(x: Tensor, h: int) -> Tensor:
    return x.view(*x.shape[:2], h, -1).transpose(1, 2)


def mha(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, h: int) -> Tensor:
    q, k, v = (_heads(x @ w, h) for w in (wq, wk, wv))
    return attend(q, k, v).transpose(1, 2).flatten(2) @ wo


def packed_attention(x: Tensor, h: int) -> Tensor:
    q, k, v = x.view(*x.shape[:2], 3, h, -1).permute(2, 0, 3, 1, 4).unbind()
    return attend(q, k, v).transpose(1, 2).flatten(2)


def packed_projection(x: Tensor, w: Tensor, h: int) -> Tensor:
    return (x @ w).view(x.shape[0], 3, h, -1).flatten(1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + (x @ a) @ b


def grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    g, k, _ = w.shape
    return torch.einsum("tgk,gkn->tgn", x.view(-1, g, k), w).flatten(1)


def norm_linear(x: Tensor, scale: Tensor, shift: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale, shift) @ w


def grouped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return attend(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T) @ v


def patch_embed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=w.shape[2:]).flatten(2).transpose(1, 2)


def pixel_shuffle(x: Tensor, r: int, s: int) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, c // (r * s), r, s, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // (r * s), h * r, w * s)


def channel_shuffle(x: Tensor, g: int) -> Tensor:
    return x.view(x.shape[0], g, -1).transpose(1, 2).flatten(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(2, 3)


def bilinear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return x @ w @ y.T


def soft_cross_entropy(x: Tensor, p: Tensor) -> Tensor:
    return -(x.log_softmax(1) * p).sum()


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w[:, None], groups=w.shape[0])


def residual(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return x + h @ w


def combine(weights: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("te,etd->td", weights, experts)


def glu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * torch.sigmoid(b)


def pack(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([q, k], 1)


def unpack(x: Tensor, p: int) -> tuple[Tensor, Tensor]:
    return x[:, :p] * 1.0, x[:, p:] * 1.0


def largest(x: Tensor) -> Tensor:
    return x.amax(1)


def outer_sum(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] + y


def segment_mean(x: Tensor, s: int) -> Tensor:
    return x.view(-1, s, x.shape[1]).mean(1)


def mixed_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsd,dhe->bhse", x, w)
