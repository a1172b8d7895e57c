"""Operators made of several, as models have them, with annotations that are right: the second source of annotation
mutants. Built-in operators have short annotations; these have groups, reductions inside, and sizes given by keyword."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.spec import OperatorSpec

from verify.self_test.operators.mutants.mutant import Function, spec_of


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.gelu(x @ w1 + b1) @ w2 + b2


def _heads(x: Tensor, h: int) -> Tensor:
    return x.view(*x.shape[:2], h, -1).transpose(1, 2)


def _mha(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, h: int) -> Tensor:
    q, k, v = (_heads(x @ w, h) for w in (wq, wk, wv))
    return _attention(q, k, v).transpose(1, 2).flatten(2) @ wo


def _packed_attention(x: Tensor, h: int) -> Tensor:
    q, k, v = x.view(*x.shape[:2], 3, h, -1).permute(2, 0, 3, 1, 4).unbind()
    return _attention(q, k, v).transpose(1, 2).flatten(2)


def _packed_projection(x: Tensor, w: Tensor, h: int) -> Tensor:
    return (x @ w).view(x.shape[0], 3, h, -1).flatten(1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + (x @ a) @ b


def _grouped_linear(x: Tensor, w: Tensor) -> Tensor:
    g, k, _ = w.shape
    return torch.einsum("tgk,gkn->tgn", x.view(-1, g, k), w).flatten(1)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def _norm_linear(x: Tensor, scale: Tensor, shift: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, scale.shape, scale, shift) @ w


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(2, 3), -1) @ v


def _grouped_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return _attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T) @ v


def _patch_embed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=w.shape[2:]).flatten(2).transpose(1, 2)


def _pixel_shuffle(x: Tensor, r: int, s: int) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, c // (r * s), r, s, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // (r * s), h * r, w * s)


def _channel_shuffle(x: Tensor, g: int) -> Tensor:
    return x.view(x.shape[0], g, -1).transpose(1, 2).flatten(1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(2, 3)


def _bilinear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return x @ w @ y.T


def _soft_cross_entropy(x: Tensor, p: Tensor) -> Tensor:
    return -(x.log_softmax(1) * p).sum()


def _squared_error(x: Tensor, t: Tensor) -> Tensor:
    return (x - t).pow(2).sum()


def _depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w[:, None], groups=w.shape[0])


def _residual(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
    return x + h @ w


def _combine(weights: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("te,etd->td", weights, experts)


def _glu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * torch.sigmoid(b)


def _pack(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([q, k], 1)


def _unpack(x: Tensor, p: int) -> tuple[Tensor, Tensor]:
    return x[:, :p] * 1.0, x[:, p:] * 1.0


def _largest(x: Tensor) -> Tensor:
    return x.amax(1)


def _outer_sum(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] + y


def _segment_mean(x: Tensor, s: int) -> Tensor:
    return x.view(-1, s, x.shape[1]).mean(1)


def _mixed_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsd,dhe->bhse", x, w)


_CORPUS: tuple[tuple[str, str, Function], ...] = (
    ("linear with bias", "b k+, n k+, +n -> b n", _linear),
    ("SwiGLU", "t d^, d^ f+, d^ f+, f+ e -> t e", _swiglu),
    ("MLP with biases", "t d^, d^ f+, f+, f+ e, +e -> t e", _mlp),
    ("attention with projections", "b s^ c^, c^ (h+ d^), c^ (h+ d^), c^ (h+ d^), (h+ d^) e -> b s^ e", _mha),
    ("packed attention", "b s^ (3 h d^) -> b s^ (h d^)", _packed_attention),
    ("packed projection", "t c+, c+ (3 h d) -> t (3 h d)", _packed_projection),
    ("rotary embedding", "s h (2 d), s d, s d -> s h (2 d)", _rope),
    ("LoRA", "t k+, k+ n, k+ r^, r^ n -> t n", _lora),
    ("grouped bmm", "e t k+, e k+ n -> e t n", torch.bmm),
    ("grouped linear", "t (g k+), g k+ n -> t (g n)", _grouped_linear),
    ("RMSNorm", "t d^, d^ -> t d^", _rms_norm),
    ("norm and linear", "t d^, d^, d^, d^ n -> t n", _norm_linear),
    ("attention", "b h q d^, b h k^ d^, b h k^ e -> b h q e", _attention),
    ("grouped-query attention", "b (h g) q d^, b h k^ d^, b h k^ e -> b (h g) q e", _grouped_query),
    ("linear attention", "q d+, k+ d+, k+ v -> q v", _linear_attention),
    ("patch embedding", "b c+ (h p+) (w q+), e c+ p+ q+ -> b (h w) e", _patch_embed),
    ("pixel shuffle", "b (c r s) h w -> b c (h r) (w s)", _pixel_shuffle),
    ("channel shuffle", "b (g c) -> b (c g)", _channel_shuffle),
    ("scores", "b h q d+, b h k d+ -> b h q k", _scores),
    ("bilinear form", "m i+, i+ j+, n j+ -> m n", _bilinear),
    ("cross entropy of probabilities", "t+ c^, t+ c^ -> ()", _soft_cross_entropy),
    ("squared error", "a+ b+, a+ b+ -> ()", _squared_error),
    ("depthwise convolution", "b c l^, c w^ -> b c m^", _depthwise),
    ("residual", "+t d, t f+, f+ d -> t d", _residual),
    ("mixture of experts", "t e+, e+ t d -> t d", _combine),
    ("GLU", "t (2 f) -> t f", _glu),
    ("packing", "t q, t k -> t [q k]", _pack),
    ("unpacking", "t [p q] -> t p, t q", _unpack),
    ("largest", "t c+max -> t", _largest),
    ("outer sum", "m, n -> m n", _outer_sum),
    ("segment mean", "(b s^) d -> b d", _segment_mean),
    ("projection to heads", "b s d+, d+ h e -> b h s e", _mixed_heads),
)


def composed_operators() -> tuple[OperatorSpec, ...]:
    """Return every operator of the corpus; its inputs are drawn from its annotation."""
    given = {"depthwise convolution": lambda: (torch.randn(6, 12, 9), torch.randn(12, 4))}
    return tuple(spec_of(name, annotation, function, given.get(name)) for name, annotation, function in _CORPUS)
