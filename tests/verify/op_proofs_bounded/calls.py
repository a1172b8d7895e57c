"""Calls on which semantics are compared with torch: a function, and the tensors that it is given.

`f`: floats of both signs, `p`: positive ones, `u`: between 0 and 1; `g`, `c` and `q` are the same without gradient.
`b`: booleans, `iN`: integers below N, `d`: the integers below the size in some order. What autograd does behind these
calls is compared too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = tuple[Callable[..., Any], str]
aten = torch.ops.aten

UNARY: list[Call] = [
    *((getattr(torch, n), "f2,3") for n in "neg abs sgn sign relu square sigmoid sin cos tan atan sinh".split()),
    *((getattr(torch, n), "f2,3") for n in "cosh tanh asinh exp expm1 erf erfc floor ceil isnan".split()),
    *((getattr(torch, n), "p2,3") for n in "reciprocal rsqrt sqrt log log1p".split()),
    (torch.lgamma, "c2,3"),
    *((getattr(torch, n), "u2,3") for n in "asin acos atanh".split()),
    (torch.logit, "q2,3"),
    (lambda x: torch.acosh(x + 1), "p2,3"),
    (torch.logical_not, "f2,3"),
    (torch.logical_not, "b2,3"),
    (torch.bitwise_not, "b2,3"),
    (torch.bitwise_not, "i5:2,3"),
    *((getattr(torch.nn.functional, n), "f2,3") for n in "silu leaky_relu gelu".split()),
    *((getattr(torch.nn.functional, n), "g2,3") for n in "hardsigmoid hardswish softplus".split()),
    (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "g2,3"),
    (lambda x: torch.nn.functional.hardtanh(x, -0.5, 0.7), "g2,3"),
    (torch.nn.functional.logsigmoid, "f2,3"),
    (lambda x: torch.logit(x, 0.3), "q2,3"),
    (torch.clone, "f2,3"),
    (lambda x: x.int().double() if x.dtype == torch.bool else x.double(), "b2,3"),
    (lambda x: aten._to_copy(x, dtype=torch.float64), "i5:4"),
    *((lambda x, e=e: x**e, "p3") for e in (0, 1, 2, 3, -1, -2, 0.5, 2.5, -0.5)),
]

BINARY: list[Call] = [
    *((getattr(torch, n), "f2,3 f3") for n in "mul eq ne lt le gt ge maximum minimum logical_and logical_or".split()),
    *((getattr(torch, n), "i3:2,3 i3:3") for n in "mul eq ne lt le gt ge maximum logical_xor".split()),
    *((getattr(torch, n), "b2,3 b3") for n in "bitwise_and bitwise_or bitwise_xor logical_xor".split()),
    *((lambda x, n=n: getattr(aten, n).Scalar(x, 1), "i3:2,3") for n in "eq ne lt le gt ge mul add sub rsub".split()),
    *((lambda x, n=n: getattr(aten, n).Scalar(x, True), "b2,3") for n in "bitwise_and bitwise_or bitwise_xor".split()),
    (torch.div, "f2,3 p3"),
    (lambda x: aten.div.Scalar(x, 3), "f2,3"),
    (lambda x: aten.mul.Scalar(x, -0.5), "f2,3"),
    (lambda a, b: torch.add(a, b, alpha=-2), "f2,3 f3"),
    (lambda a, b: torch.sub(a, b, alpha=3), "f2,3 f2,1"),
    (lambda a, b: torch.rsub(a, b, alpha=3), "f2,3 f2,1"),
    (lambda a, b: a + b * 2, "i4:3 f3"),
    (lambda x: aten.floor_divide.Scalar(x, 3), "i9:5"),
    (lambda a, b: aten.floor_divide.default(a, b + 1), "i9:5 i3:5"),
    (torch.floor_divide, "g2,3 c3"),
    (lambda x: aten.div.Scalar_mode(x, 2, rounding_mode="floor"), "i9:5"),
    (lambda a, b: torch.div(a, b, rounding_mode="floor"), "f2,3 p3"),
    (lambda a, b: torch.div(a, b, rounding_mode=None), "f2,3 p3"),
    (lambda x: aten.remainder.Scalar(x - 4, 3), "i9:5"),
    (lambda a, b: aten.remainder.Tensor(a, b + 1), "i9:5 i3:5"),
    (torch.where, "b2,3 f3 f2,1"),
    (lambda m, x: torch.where(m, x, 0.5), "b2,3 f3"),
    (lambda x, m: x.masked_fill(m, -1.5), "f2,3 b3"),
    (lambda x, m, v: x.masked_fill(m, v.sum()), "f2,3 b3 f2"),
    (lambda x: torch.clamp(x, -0.5, 0.7), "f2,3"),
    (lambda x: torch.clamp(x, max=0.2), "f2,3"),
    (torch.clamp, "f2,3 f3 f1"),
    (lambda x, a: torch.clamp(x, min=a), "f2,3 f3"),
    (lambda x: aten.clamp_min(x, 0.1), "f2,3"),
    (lambda x: aten.clamp_max(x, 0.1), "f2,3"),
    (aten.clamp_min.Tensor, "f2,3 f3"),
    (aten.clamp_max.Tensor, "f2,3 f3"),
    (torch.pow, "p2,3 f3"),
    (lambda x: aten.pow.Scalar(2.0, x), "f3"),
    (lambda x, a, b: torch.addcmul(x, a, b, value=-2), "f2,3 f3 f2,1"),
    (lambda a, b: torch.lerp(a, b, 0.3), "f2,3 f2,3"),
    (torch.lerp, "f2,3 f2,3 f2,3"),
]

REDUCTIONS: list[Call] = [
    (torch.sum, "f2,3"),
    (torch.sum, "b2,3"),
    (lambda x: x.sum((0, -1), keepdim=True), "f2,3,4"),
    (torch.mean, "f2,3"),
    (lambda x: x.mean(1), "f2,3,4"),
    (aten.var.default, "f2,3"),
    (lambda x: aten.var.dim(x, [1], False), "f2,3"),
    (lambda x: torch.var(x, 1, correction=0), "f2,3"),
    (lambda x: torch.var_mean(x, (0, 2), correction=1), "f2,3,4"),
    (lambda x: x.amax((0, 1)), "f2,3,4"),
    (lambda x: x.amin(-1, keepdim=True), "f2,3"),
    (torch.max, "f2,3"),
    (torch.min, "f2,3"),
    *((function, "b2,3") for function in (torch.any, torch.all)),
    *((lambda x, n=n: getattr(torch, n)(x, 1), "b2,3") for n in ("any", "all")),
    *((lambda x, n=n: getattr(torch, n)(x, (0, 2)), "b2,2,2") for n in ("any", "all")),
    (torch.count_nonzero, "i2:2,3"),
    (lambda x: torch.count_nonzero(x, (0,)), "b2,3"),
    (torch.prod, "f4"),
    (lambda x: x.prod(1), "f2,3"),
    (lambda x: x.cumsum(0), "f3,2"),
    (lambda x: x.cumsum(0), "f"),
    (lambda x: x.cumprod(1), "g2,3"),
    (torch.mm, "f2,3 f3,4"),
    (torch.bmm, "f2,3,4 f2,4,2"),
    (torch.mv, "f2,3 f3"),
    (torch.dot, "f3 f3"),
    (lambda x, a, b: torch.addmm(x, a, b, beta=-2, alpha=0.5), "f4 f2,3 f3,4"),
    (lambda x, a, b: torch.baddbmm(x, a, b, beta=-2, alpha=0.5), "f2,1,4 f2,2,3 f2,3,4"),
    (lambda x: x.softmax(0), "f3,2"),
    (lambda x: x.softmax(0), "f"),
    (lambda x: x.log_softmax(-1), "f3,2"),
    (lambda x: aten._safe_softmax(x, 1), "f2,3"),
    (lambda x, w, b: torch.nn.functional.layer_norm(x, (3, 2), w, b, 0.1), "f2,3,2 f3,2 f3,2"),
    (lambda x: torch.nn.functional.layer_norm(x, (3,)), "f2,3"),
    (lambda x, w, b: torch.nn.functional.group_norm(x, 2, w, b, 0.1), "f2,4,3 f4 f4"),
    (lambda x: torch.nn.functional.group_norm(x, 3), "f2,6,2"),
]

MADE: list[Call] = [
    (lambda x: x * torch.zeros(3, dtype=x.dtype), "f3"),
    (lambda x: x + torch.ones(3, dtype=x.dtype), "f3"),
    (lambda x: x + torch.full((3,), 2.5, dtype=x.dtype), "f3"),
    (lambda x: x + torch.full_like(x, 2.5) + torch.zeros_like(x) + torch.ones_like(x), "f3"),
    (lambda x: x[:1] + x.new_zeros(1) + x.new_ones(1) + x.new_full((1,), 2.5), "f3"),
    (lambda x: x + torch.arange(3) + torch.arange(5, 8) + torch.arange(9, 0, -3), "f3"),
    (lambda x: x + torch.eye(3) + torch.eye(3, 3), "f3"),
    (lambda x: x + aten.eye.m(2, 3), "f2,3"),
    (lambda x: x + torch.linspace(0, 1, 5, dtype=torch.float64), "f5"),
    (lambda x: torch.empty(3, dtype=x.dtype).copy_(x) + torch.empty_like(x).fill_(2.5), "f3"),
    (lambda x: x + x.new_empty(3).zero_() + aten.empty_strided([3], [1], dtype=x.dtype).fill_(x.sum()), "f3"),
    (lambda x: x + x.new_empty_strided((3,), (1,)).copy_(x), "f3"),
    (lambda x: aten.fill.Scalar(x, 2.5) + aten.fill.Tensor(x, x.sum()) + aten.zero(x), "f3"),
    (lambda x: x + torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype), "f3"),
    (aten.lift_fresh_copy, "f3"),
    (lambda a, b: torch.cat([a, b, a], -1), "f2,3 f2,1"),
    (lambda a, b: torch.stack([a, b], 1), "f2,3 f2,3"),
    (lambda x: aten._unsafe_view(x.clone(), [3, 2]), "f2,3"),
    (lambda x: x.repeat(2, 1, 3), "f2,3"),
    (lambda x: torch.repeat_interleave(x, 2, 1), "f2,3"),
    (lambda x: torch.repeat_interleave(x, 3), "f2,3"),
    (lambda x: x.flip(0, -1), "f2,3,2"),
    (lambda x: x.roll((1, -2), (0, 1)), "f2,3"),
    (lambda x: x.roll(2), "f2,3"),
    (lambda x: torch.constant_pad_nd(x, [1, 2, 0, 1], 1.5), "f2,3"),
    (lambda x: torch.constant_pad_nd(x, [-1, 2]), "f2,3"),
    (lambda x: x.tril(1), "f2,3,4"),
    (lambda x: x.triu(-1), "f4,3"),
    (lambda x: torch.pixel_shuffle(x, 2), "f2,8,2,3"),
    (lambda x: torch.pixel_unshuffle(x, 2), "f2,2,4,6"),
]

INDEXED: list[Call] = [
    (lambda w, i: torch.nn.functional.embedding(i, w), "f4,3 i4:2,3"),
    (lambda w, i: torch.nn.functional.embedding(i, w, padding_idx=1), "f4,3 i4:2,3"),
    (lambda w, i: torch.nn.functional.embedding(i, w, padding_idx=0), "f4,3 i4:"),
    (lambda x, i: x.index_select(1, i), "f2,4,2 i4:3"),
    (lambda x, i, s: x.index_add(1, i, s, alpha=-0.5), "f2,4,2 i4:3 f2,3,2"),
    (lambda x, i, s: x.index_copy(0, i, s), "f4,2 d4 f4,2"),
    (lambda x, i: x.index_fill(0, i - 1, 2.5), "f4,2 i4:2"),
    (lambda x, i: x.gather(1, i), "f2,4,3 i4:2,3,2"),
    (lambda x, i: x.gather(-1, i), "b2,4 i4:2,3"),
    (lambda x, i, s: x.scatter_add(1, i, s), "f2,4 i4:2,3 f2,3"),
    (lambda x, i, s: x.scatter(0, i, s), "f4 d4 f4"),
    (lambda x, i: x.scatter(1, i, 2.5), "f2,4 i4:2,3"),
    (lambda x, i: x[i - 2], "f4,3 i4:2,2"),
    (lambda x, i, j: x[:, i, j], "f2,4,3 i4:2,1 i3:3"),
    (lambda x, i, j: x[i, :, j], "f4,2,3 i4:2 i3:2"),
    (lambda x, i, s: x.index_put((i - 2,), s, accumulate=True), "f4,2 i4:3 f3,2"),
    (lambda x, i, s: x.index_put((i,), s), "f4,2 d4 f2"),
    (lambda x, i, j, s: aten.index_put(x, [None, i, j], s, True), "f2,3,2 i3:2,1 i2:3 f2,2,3"),
    (lambda x, s: torch.slice_scatter(x, s, 1, 1, None, 2), "f2,5,2 f2,2,2"),
    (lambda x: x[:, 1:-1:2] * 2, "f2,6"),
    (lambda x, s: torch.select_scatter(x, s, 1, -1), "f2,3,2 f2,2"),
    (lambda x: x[:, -1] * 2, "f2,3"),
    (lambda x, s: torch.diagonal_scatter(x, s, 1, 0, 2), "f3,2,4 f2,3"),
    (lambda x: torch.diagonal(x, -1, 0, 1) * 2, "f3,4"),
    (lambda i: torch.nn.functional.one_hot(i, 4), "i4:2,3"),
]

WINDOWS: list[Call] = [
    (lambda x, w, b: torch.conv1d(x, w, b, 2, 1), "f2,3,5 f2,3,3 f2"),
    (lambda x, w, b: torch.conv1d(x, w, b, 1, "same", 2, 2), "f1,4,4 f6,2,2 f6"),
    (lambda x, w: torch.conv2d(x, w, None, (2, 1), (1, 0), (1, 2)), "f1,2,4,4 f3,2,2,2"),
    (lambda x, w: torch.conv2d(x, w, groups=2), "f2,4,3,2 f6,2,2,2"),
    (torch.conv3d, "f1,2,2,3,2 f2,2,1,2,2"),
    (lambda x, w, b: torch.conv_transpose1d(x, w, b, 2, 1, 1, 1, 2), "f2,3,3 f3,2,2 f2"),
    (lambda x, w: torch.conv_transpose2d(x, w, None, (2, 1), (1, 0), (1, 0), 2), "f1,4,2,3 f4,1,3,2"),
    (lambda x: aten.im2col(x, [3, 2], [1, 1], [1, 0], [1, 2]), "f2,2,5,4"),
    (lambda x: torch.nn.functional.fold(x, (3, 4), (2, 2), stride=(1, 2)), "f2,8,4"),
]

LOSSES: list[Call] = [
    *(
        (lambda x, t, r=r: torch.nn.functional.mse_loss(x, t, reduction=r), "f2,3 f2,3")
        for r in ("none", "mean", "sum")
    ),
    *((lambda x, t, r=r: aten.smooth_l1_loss(x, t, r, 0.3), "f2,3 f2,3") for r in (0, 1, 2)),
    (lambda x, t: aten.smooth_l1_loss(x, t, 1, 0.0), "f2,3 f2,3"),
    *((lambda x, t, r=r: aten.huber_loss(x, t, r, 0.3), "f2,3 f2,3") for r in (0, 1, 2)),
    *((lambda x, t, r=r: aten.soft_margin_loss(x, t, r), "f2,3 g2,3") for r in (0, 1, 2)),
    *((lambda x, t, r=r: aten.binary_cross_entropy(x, t, None, r), "u2,3 u2,3") for r in (0, 1, 2)),
    (lambda x, t, w: aten.binary_cross_entropy(x, t, w, 1), "u2,3 u2,3 c3"),
    *(
        (lambda x, t, w, p, r=r: aten.binary_cross_entropy_with_logits(x, t, w, p, r), "f2,3 u2,3 c3 c3")
        for r in (0, 1, 2)
    ),
    (aten.binary_cross_entropy_with_logits, "f2,3 u2,3"),
]


def _chained(x: Tensor) -> Tensor:
    """Views of views, and writes through them."""
    y = x.clone()
    y.view(2, 3, 2)[:, 1:].transpose(0, 2)[0, :, 1].mul_(7)
    y.t()[0].add_(1)
    y[1] = y[0] * 2
    z = y[:, 1:].diagonal(1).unsqueeze(0)
    return torch.cat([z.reshape(-1), y.as_strided((2,), (3,), 1), y.expand(2, 2, 6).flatten()])


def _in_place(x: Tensor, m: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(m, 0.5).neg_().div_(2)
    y.index_put_((torch.tensor([1, 0]),), y[:2] + 1)
    return y.sigmoid_()


MEMORY: list[Call] = [(_chained, "f2,6"), (_in_place, "f2,3 b3")]

CALLS: list[Call] = [*UNARY, *BINARY, *REDUCTIONS, *MADE, *INDEXED, *WINDOWS, *LOSSES, *MEMORY]


def draw(kinds: str, seed: int) -> list[Tensor]:
    """The tensors of a call."""
    generator = torch.Generator().manual_seed(seed)
    shuffle = random.Random(seed)
    return [_tensor(word, generator, shuffle) for word in kinds.split(" ")]


def _tensor(word: str, generator: torch.Generator, shuffle: random.Random) -> Tensor:
    kind, rest = word[0], word[1:]
    if kind == "d":
        order = list(range(int(rest)))
        shuffle.shuffle(order)
        return torch.tensor(order)
    high, _, sizes = rest.partition(":") if kind == "i" else ("", "", rest)
    shape = [int(size) for size in sizes.split(",") if size]
    if kind == "i":
        return torch.randint(0, int(high), shape, generator=generator)
    if kind == "b":
        return torch.rand(shape, generator=generator) < 0.5
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind in "pucq":
        return uniform * 0.8 + 0.1 + (0.4 if kind in "pc" else 0.0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def wants_gradient(kinds: str) -> list[bool]:
    """Which tensors of a call are asked for gradients: floats, but no weights of classes."""
    return [word[0] in "fpu" for word in kinds.split(" ")]
