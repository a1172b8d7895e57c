"""Semantics of losses, of softmax, and of layer and group norm, with their gradients.

The maximum that kernels of softmax subtract first cancels in real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from types import MappingProxyType

import numpy as np

from op_registry.builtin._name_and_broadcast_dims import whole

from verify.evidence.smt.element_arithmetic import Element, Numbers
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, array, each
from verify.evidence.smt.semantics.reductions_and_products import mean_of, variance_of

# Losses that work entry by entry, and their gradients.


NONE, MEAN, SUM = 0, 1, 2
Entry = Callable[[Numbers, Given, Element, Element], Element]


def reduced(al: Numbers, entries: Array, reduction: int) -> Array:
    """The entries themselves, their mean or their sum."""
    if reduction == NONE:
        return entries
    total = al.sum(list(entries.reshape(-1)))
    return array([total if reduction == SUM else al.multiply(Fraction(1, entries.size), total)], ())


def _loss(entry: Entry) -> Rule:
    def rule(al: Numbers, given: Given) -> Array:
        entries = each(lambda x, t: entry(al, given, x, t), given["self"], given["target"])
        return reduced(al, entries, given["reduction"])

    return rule


def _gradient(slope: Entry) -> Rule:
    """The cotangent by the slope, over the number of entries for a mean."""

    def rule(al: Numbers, given: Given) -> Array:
        slopes = each(lambda x, t: slope(al, given, x, t), given["self"], given["target"])
        share = Fraction(1, slopes.size) if given["reduction"] == MEAN else 1
        return each(lambda g, s: al.multiply(share, al.multiply(g, s)), given["grad_output"], slopes)

    return rule


def _mse_slope(al: Numbers, _given: Given, x: Element, t: Element) -> Element:
    return al.multiply(2, al.subtract(x, t))


def _smooth_l1(al: Numbers, given: Given, x: Element, t: Element) -> Element:
    beta, distance = given["beta"], al.absolute(al.subtract(x, t))
    if beta == 0:
        return distance
    inside = al.multiply(Fraction(1, 2) / Fraction(beta), al.multiply(distance, distance))
    return al.where(al.less(distance, beta), inside, al.subtract(distance, Fraction(beta) / 2))


def _smooth_l1_slope(al: Numbers, given: Given, x: Element, t: Element) -> Element:
    beta, signed = given["beta"], al.subtract(x, t)
    if beta == 0:
        return al.sign(signed)
    inside = al.multiply(1 / Fraction(beta), signed)
    return al.where(al.less(al.absolute(signed), beta), inside, al.sign(signed))


def _huber_slope(al: Numbers, given: Given, x: Element, t: Element) -> Element:
    delta, signed = given["delta"], al.subtract(x, t)
    return al.where(al.less(al.absolute(signed), delta), signed, al.multiply(delta, al.sign(signed)))


_LOSSES: Mapping[str, Rule] = {
    "aten.mse_loss_backward.default": _gradient(_mse_slope),
    "aten.smooth_l1_loss.default": _loss(_smooth_l1),
    "aten.smooth_l1_loss_backward.default": _gradient(_smooth_l1_slope),
    "aten.huber_loss_backward.default": _gradient(_huber_slope),
}


# Softmax and norms.


Row = list[Element]


def _along(x: Array, dim: int, function: Callable[..., Row], *others: Array) -> Array:
    """Apply `function` to every row along `dim`, of `x` and of the others, which have its shape."""
    if x.ndim == 0:
        return array(function([x[()]], *([o[()]] for o in others)), ())
    moved = [np.moveaxis(t, whole(dim, x.ndim), -1) for t in (x, *others)]
    rows = zip(*(m.reshape(-1, m.shape[-1]) for m in moved), strict=True)
    items = [e for row in rows for e in function(*(list(r) for r in row))]
    return np.moveaxis(array(items, moved[0].shape), -1, whole(dim, x.ndim))


def _softmax(al: Numbers, given: Given) -> Array:
    def row(x: Row) -> Row:
        powers = [al.function("exp", e) for e in x]
        total = al.sum(powers)
        return [al.divide(p, total) for p in powers]

    return _along(given["self"], given["dim"], row)


def _log_softmax(al: Numbers, given: Given) -> Array:
    def row(x: Row) -> Row:
        total = al.function("log", al.sum([al.function("exp", e) for e in x]))
        return [al.subtract(e, total) for e in x]

    return _along(given["self"], given["dim"], row)


def _statistics(al: Numbers, row: Row, eps: Element) -> tuple[Element, Element]:
    """Return the mean, and one over the standard deviation."""
    spread = al.add(variance_of(al, row, 0), eps)
    return al.named(mean_of(al, row)), al.reciprocal(al.function("sqrt", al.named(spread)))


def _standardised(al: Numbers, row: Row, mean: Element, scale: Element) -> Row:
    return [al.named(al.multiply(al.subtract(e, mean), scale)) for e in row]


def _standardised_rows(al: Numbers, rows: Array, eps: Element) -> tuple[Row, Row, Row]:
    """Return all values of the rows, standardised, and the mean and the scale of each row."""
    found: Row = []
    statistics = [_statistics(al, list(row), eps) for row in rows]
    for row, (mean, scale) in zip(rows, statistics, strict=True):
        found += _standardised(al, list(row), mean, scale)
    return found, [mean for mean, _ in statistics], [scale for _, scale in statistics]


def _layer_norm(al: Numbers, given: Given) -> tuple[Array, Array, Array]:
    x, size = given["input"], prod(given["normalized_shape"])
    found, means, scales = _standardised_rows(al, x.reshape(-1, size), given["eps"])
    y = _scaled(al, array(found, x.shape), given["weight"], given["bias"])
    shapes = [o.shape for o in given.outputs[1:] if o is not None]
    return y, array(means, shapes[0]), array(scales, shapes[1])


def _scaled(al: Numbers, x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else each(al.multiply, x, weight)
    return x if bias is None else each(al.add, x, bias)


def _row_gradient(al: Numbers, grad: Row, standard: Row, scale: Element) -> Row:
    """Return the gradient of a row from that of its standardised values."""
    shared, along = al.named(mean_of(al, grad)), al.multiply(Fraction(1, len(grad)), al.dot(grad, standard))
    along = al.named(along)
    return [
        al.multiply(scale, al.subtract(al.subtract(g, shared), al.multiply(s, along)))
        for g, s in zip(grad, standard, strict=True)
    ]


def _layer_norm_backward(al: Numbers, given: Given) -> tuple[Array | None, ...]:
    x, size = given["input"], prod(given["normalized_shape"])
    grad, weight = given["grad_out"], given["weight"]
    means, scales = given["mean"].reshape(-1), given["rstd"].reshape(-1)
    standard = [_standardised(al, list(r), m, s) for r, m, s in zip(x.reshape(-1, size), means, scales, strict=True)]
    inner = _scaled(al, grad, weight, None).reshape(-1, size)
    rows = [_row_gradient(al, list(g), s, scale) for g, s, scale in zip(inner, standard, scales, strict=True)]
    flat = grad.reshape(-1, size)
    by_weight, by_bias = _parameter_gradients(al, flat, standard)
    shape = given["normalized_shape"]
    every = (array([e for r in rows for e in r], x.shape), array(by_weight, shape), array(by_bias, shape))
    return tuple(g if wanted else None for g, wanted in zip(every, given["output_mask"], strict=True))


def _parameter_gradients(al: Numbers, grad: Array, standard: Sequence[Row]) -> tuple[Row, Row]:
    """Return the gradients of a weight and a bias with one entry per column."""
    columns = range(grad.shape[1])
    by_weight = [al.dot(list(grad[:, j]), [row[j] for row in standard]) for j in columns]
    return by_weight, [al.sum(list(grad[:, j])) for j in columns]


def _group_norm(al: Numbers, given: Given) -> tuple[Array, Array, Array]:
    """Channels are [groups, channels of a group]; statistics run over a group's channels and positions."""
    x, samples, channels, groups = given["input"], given["N"], given["C"], given["group"]
    found, means, scales = _standardised_rows(al, x.reshape(samples * groups, -1), given["eps"])
    per_channel = [None if given[key] is None else given[key].reshape(1, channels, 1) for key in ("weight", "bias")]
    y = _scaled(al, array(found, (samples, channels, given["HxW"])), *per_channel)
    shape = (samples, groups)
    return y.reshape(x.shape), array(means, shape), array(scales, shape)


def _group_norm_backward(al: Numbers, given: Given) -> tuple[Array | None, ...]:
    x, samples, channels, groups = given["input"], given["N"], given["C"], given["group"]
    shape = (samples, channels, given["HxW"])
    grad, weight = given["grad_out"].reshape(shape), given["weight"]
    inner = _scaled(al, grad, None if weight is None else weight.reshape(1, channels, 1), None)
    rows, scales = x.reshape(samples * groups, -1), given["rstd"].reshape(-1)
    means = given["mean"].reshape(-1)
    standard = [_standardised(al, list(r), m, s) for r, m, s in zip(rows, means, scales, strict=True)]
    by_row = [
        _row_gradient(al, list(g), s, scale)
        for g, s, scale in zip(inner.reshape(samples * groups, -1), standard, scales, strict=True)
    ]
    by_channel = np.moveaxis(grad, 1, -1).reshape(-1, channels)
    values = np.moveaxis(array([e for s in standard for e in s], shape), 1, -1).reshape(-1, channels)
    by_weight, by_bias = _parameter_gradients(al, by_channel, [list(row) for row in values])
    every = (array([e for r in by_row for e in r], x.shape), array(by_weight, (channels,)), array(by_bias, (channels,)))
    return tuple(g if wanted else None for g, wanted in zip(every, given["output_mask"], strict=True))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **_LOSSES,
        "aten._softmax.default": _softmax,
        "aten._safe_softmax.default": _softmax,
        "aten._log_softmax.default": _log_softmax,
        "aten.native_layer_norm.default": _layer_norm,
        "aten.native_layer_norm_backward.default": _layer_norm_backward,
        "aten.native_group_norm.default": _group_norm,
        "aten.native_group_norm_backward.default": _group_norm_backward,
    }
)
