"""Wrong backwards.

Every shard runs the same wrong backward as the whole operator, so that most of these only show against finite
differences; those that depend on the shard's size only show against the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from verify.self_test.operators.mutants.mutant import (
    DERIVATIVE,
    EITHER,
    SHARDS,
    STRIDES,
    Family,
    Function,
    OperatorMutant,
)
from verify.self_test.operators.mutants.right_backwards_and_mistakes import (
    HOSTS,
    Backward,
    Gradients,
    Host,
    from_cotangent,
    on_gradient,
    raw,
    rms_norm_backward,
    swapped,
    with_backward,
)
from verify.self_test.operators.right_operators import EPS, rms_norm, softmax

Change = Callable[[Backward], Backward]
_FAMILY = Family("backward")
_BY_NAME = {host.name: host for host in HOSTS}
FEW = 8


def _few_rows(gradient: Tensor, _g: Tensor, x: Tensor) -> Tensor | None:
    return None if x.shape[0] < FEW else gradient


def _general(host: Host) -> Iterator[tuple[str, Change, frozenset[str]]]:
    """Bugs that any backward may have."""
    last = host.inputs - 1
    yield "ignores its cotangent", from_cotangent(torch.ones_like), EITHER
    yield "right for all ones: squares its cotangent", from_cotangent(lambda g: g * g), EITHER
    yield "doubles the last gradient", on_gradient(last, lambda d, g, x: 2 * d), DERIVATIVE
    yield "first gradient of the wrong sign", on_gradient(0, lambda d, g, x: -d), DERIVATIVE
    yield "first gradient detached", on_gradient(0, lambda d, g, x: torch.zeros_like(d)), DERIVATIVE
    yield "divides by its own rows", on_gradient(last, lambda d, g, x: d / x.shape[0]), EITHER
    yield "scaled by its own size", on_gradient(0, lambda d, g, x: d * x.numel()), EITHER
    yield "no gradient when there are few rows", on_gradient(0, _few_rows), EITHER
    if last:
        yield "no gradient of the last input", on_gradient(last, lambda d, g, x: None), DERIVATIVE
    if host.same is not None:
        yield "swaps two gradients", swapped(*host.same), DERIVATIVE
    if host.name != "squared_error":  # its cotangent is one number
        yield "right for all ones: averages its cotangent", from_cotangent(lambda g: g.mean().expand(g.shape)), EITHER
        yield "takes its cotangent for contiguous", from_cotangent(raw), EITHER | STRIDES


def _replaced(*gradients: tuple[int, Callable[..., Tensor | None]]) -> Change:
    """Other formulas, of (cotangent, output, *inputs), for some gradients."""

    def change(backward: Backward) -> Backward:
        def changed(g: Tensor, y: Tensor, *inputs: Tensor) -> Gradients:
            found = list(backward(g, y, *inputs))
            for number, formula in gradients:
                found[number] = formula(g, y, *inputs)
            return found

        return changed

    return change


def _norm_scale(x: Tensor) -> Tensor:
    return (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def _layer_norm_without(mean: bool, projection: bool) -> Callable[..., Tensor]:
    def gradient(g: Tensor, _y: Tensor, x: Tensor, w: Tensor, _b: Tensor) -> Tensor:
        r = (x.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
        n = (x - x.mean(-1, keepdim=True)) * r
        gw = g * w
        if mean:
            gw = gw - gw.mean(-1, keepdim=True)
        return r * (gw - n * (g * w * n).mean(-1, keepdim=True)) if projection else r * gw

    return gradient


# host, what is wrong, the change
_SPECIAL: tuple[tuple[str, str, Change], ...] = (
    ("scale_shift", "no sum over rows: first row only", _replaced((2, lambda g, y, x, w, b: g[0]))),
    ("scale_shift", "mean over rows for sum", _replaced((2, lambda g, y, x, w, b: g.mean(0)))),
    ("linear", "no sum over rows: first row only", _replaced((2, lambda g, y, x, w, b: g[0]))),
    ("linear", "mean over rows for sum", _replaced((2, lambda g, y, x, w, b: g.mean(0)))),
    ("layer_norm", "no sum over rows: first row only", _replaced((2, lambda g, y, x, w, b: g[0]))),
    ("rms_norm", "forgets the mean term", _replaced((0, lambda g, y, x, w: _norm_scale(x) * g * w))),
    ("rms_norm", "forgets the weight", _replaced((0, lambda g, y, x, w: rms_norm_backward(g, y, x, w * 0 + 1)[0]))),
    ("rms_norm", "gradient of the weight not scaled", _replaced((1, lambda g, y, x, w: (g * x).sum(0)))),
    ("rms_norm", "scale of its own rows", _replaced((1, lambda g, y, x, w: (g * x * _norm_scale(x).mean()).sum(0)))),
    ("silu", "forgets the second term", _replaced((0, lambda g, y, x: g * torch.sigmoid(x)))),
    ("silu", "uses y for x", _replaced((0, lambda g, y, x: g * torch.sigmoid(y) * (1 + y * (1 - torch.sigmoid(y)))))),
    ("sigmoid", "uses x for y", _replaced((0, lambda g, y, x: g * x * (1 - x)))),
    ("sigmoid", "forgets a factor", _replaced((0, lambda g, y, x: g * y))),
    ("tanh", "uses x for y", _replaced((0, lambda g, y, x: g * (1 - x * x)))),
    ("softmax", "forgets the sum", _replaced((0, lambda g, y, x: g * y * (1 - y)))),
    ("softmax", "sums without y", _replaced((0, lambda g, y, x: y * (g - g.sum(-1, keepdim=True))))),
    ("softmax", "sums over all rows", _replaced((0, lambda g, y, x: y * (g - (g * y).sum())))),
    ("layer_norm", "forgets the mean", _replaced((0, _layer_norm_without(False, True)))),
    ("layer_norm", "forgets the projection", _replaced((0, _layer_norm_without(True, False)))),
    ("swiglu", "forgets silu", _replaced((1, lambda g, y, x, u: g * x))),
    ("swiglu", "uses the gate for both", _replaced((1, lambda g, y, x, u: g * F.silu(u)))),
    ("squared_error", "forgets a factor of two", _replaced((0, lambda g, y, x, t: g * (x - t)))),
    ("squared_error", "mean for sum", _replaced((0, lambda g, y, x, t: 2 * g * (x - t) / x.numel()))),
    ("weighted_sum", "uses x for the weights", _replaced((0, lambda g, y, x, v: g[:, None] * x))),
    ("attend", "softmax not differentiated", _replaced((0, lambda g, y, q, k, v: (g @ v.transpose(-1, -2)) @ k))),
    ("attend", "forgets v's probabilities", _replaced((2, lambda g, y, q, k, v: (q @ k.transpose(-1, -2)).mT @ g))),
)


def _rotated(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def _scatter(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(weight).index_add_(0, ids, x)


def _lookup(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids]


def _overwrites(g: Tensor, _y: Tensor, weight: Tensor, ids: Tensor) -> Gradients:
    found = torch.zeros_like(weight)
    found[ids] = g
    return found, None


def _first_of_each(g: Tensor, _y: Tensor, weight: Tensor, ids: Tensor) -> Gradients:
    return _scatter(g, weight, ids) / torch.bincount(ids, minlength=weight.shape[0]).clamp(min=1)[:, None], None


def _table() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 12), torch.tensor([0, 8, 3, 3, 5, 1, 8, 0, 2, 3, 7, 0])


def _flag(columns: float) -> Function:
    """A sum whose backward thinks that it is a mean over `columns` columns; 0: over its own."""
    return with_backward(lambda x: x.sum(1), lambda g, y, x: (g[:, None].expand(x.shape) / (columns or x.shape[1]),))


def _hooked(hook: Callable[[Tensor], Tensor]) -> Function:
    def operator(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        if y.requires_grad:
            y.register_hook(hook)
        return y

    return operator


def _clipped(g: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(g)
    return g / norm.clamp(min=1.0)


def _own() -> Iterator[OperatorMutant]:
    """Operators of their own, outside the hosts."""
    make = _FAMILY.mutant
    right = with_backward(_rotated, lambda g, y, x, w: (g @ w.T, x.T @ g))
    wrong = with_backward(_rotated, lambda g, y, x, w: (g @ w, x.T @ g))
    yield make("rotate: missing transpose of the weight", "m d^, d^ d^ -> m d^", wrong, right, DERIVATIVE)
    wrong = with_backward(_rotated, lambda g, y, x, w: (g @ w.T, g.T @ x))
    yield make("rotate: gradient of the weight transposed", "m d^, d^ d^ -> m d^", wrong, right, DERIVATIVE)
    rows = with_backward(_lookup, lambda g, y, weight, ids: (_scatter(g, weight, ids), None))
    for what, backward in (("overwrites where ids repeat", _overwrites), ("averages where ids repeat", _first_of_each)):
        wrong = with_backward(_lookup, backward)
        yield make(f"lookup: {what}", "v^ d, t -> t d", wrong, rows, EITHER, _table)
    summed = with_backward(lambda x: x.sum(1), lambda g, y, x: (g[:, None].expand(x.shape),))
    yield make("sum: backward of a mean over its own columns", "m k+ -> m", _flag(0), summed, EITHER)
    yield make("sum: backward of a mean over 12", "m k+ -> m", _flag(12), summed, DERIVATIVE)
    plain = _hooked(lambda g: g)
    yield make("hook: doubles the gradient", "a n, n -> a n", _hooked(lambda g: 2 * g), plain, DERIVATIVE)
    yield make("hook: clips by its own norm", "a n, n -> a n", _hooked(_clipped), plain, EITHER)
    once = with_backward(softmax, lambda g, y, x: (y * (g - (g * y).sum(-1, keepdim=True)),))
    peak = with_backward(softmax, lambda g, y, x: (y * (g - (g * y).sum(-1, keepdim=True)) * (x < x.max() + 1),))
    bad = with_backward(softmax, lambda g, y, x: (y * (g - (g * y).sum(-1, keepdim=True)) * (x < x.max()),))
    yield make("softmax: no gradient at its own maximum", "m n^ -> m n^", bad, peak, EITHER)
    few = with_backward(softmax, lambda g, y, x: (y * (g - (g * y).sum(-1, keepdim=True)) * (1 + (x.shape[0] == 3)),))
    yield make("softmax: doubled on three rows", "m n^ -> m n^", few, once, SHARDS)


def _generated() -> Iterator[OperatorMutant]:
    twins = {host.name: host.right for host in HOSTS}
    for host in HOSTS:
        for what, change, codes in _general(host):
            yield _FAMILY.mutant(f"{host.name}: {what}", host.annotation, host.wrong(change), twins[host.name], codes)
    for name, what, change in _SPECIAL:
        host = _BY_NAME[name]
        yield _FAMILY.mutant(f"{name}: {what}", host.annotation, host.wrong(change), twins[name], EITHER)


def mutants() -> tuple[OperatorMutant, ...]:
    """Return every wrong backward."""
    return (
        *_generated(),
        *_own(),
        _FAMILY.mutant(
            "rms_norm: cotangent of its own rows added",
            "m n^, n^ -> m n^",
            with_backward(rms_norm, lambda g, y, x, w: rms_norm_backward(g + g.mean(0), y, x, w)),
            with_backward(rms_norm, rms_norm_backward),
            EITHER,
        ),
    )
