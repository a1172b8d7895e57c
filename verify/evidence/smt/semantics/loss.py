"""Semantics of losses that work entry by entry, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from verify.evidence.smt.algebra import Element, Numbers
from verify.evidence.smt.semantics.pointwise import log_sigmoid, sigmoid
from verify.evidence.smt.semantics.rule import Array, Given, Result, Rule, array, each

NONE, MEAN, SUM = 0, 1, 2
_LEAST_LOG = -100  # torch clamps logarithms of the binary cross entropy
_LEAST_DENOMINATOR = Fraction(1e-12)  # and the denominator of its gradient

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


def _mse(al: Numbers, _given: Given, x: Element, t: Element) -> Element:
    distance = al.subtract(x, t)
    return al.multiply(distance, distance)


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


def _huber(al: Numbers, given: Given, x: Element, t: Element) -> Element:
    delta, distance = given["delta"], al.absolute(al.subtract(x, t))
    inside = al.multiply(Fraction(1, 2), al.multiply(distance, distance))
    outside = al.multiply(delta, al.subtract(distance, Fraction(delta) / 2))
    return al.where(al.less(distance, delta), inside, outside)


def _huber_slope(al: Numbers, given: Given, x: Element, t: Element) -> Element:
    delta, signed = given["delta"], al.subtract(x, t)
    return al.where(al.less(al.absolute(signed), delta), signed, al.multiply(delta, al.sign(signed)))


def _soft_margin(al: Numbers, _given: Given, x: Element, t: Element) -> Element:
    return al.function("log", al.add(1, al.function("exp", al.negative(al.multiply(t, x)))))


def _soft_margin_slope(al: Numbers, _given: Given, x: Element, t: Element) -> Element:
    power = al.function("exp", al.negative(al.multiply(t, x)))
    return al.divide(al.negative(al.multiply(t, power)), al.add(1, power))


def _log(al: Numbers, x: Element) -> Element:
    return al.maximum(al.function("log", x), _LEAST_LOG)


def _bce(al: Numbers, given: Given) -> Array:
    def entry(x: Element, t: Element) -> Element:
        other = al.multiply(al.subtract(1, t), _log(al, al.subtract(1, x)))
        return al.negative(al.add(al.multiply(t, _log(al, x)), other))

    return reduced(al, _weighted(al, each(entry, given["self"], given["target"]), given["weight"]), given["reduction"])


def _weighted(al: Numbers, entries: Array, weight: Array | None) -> Array:
    return entries if weight is None else each(al.multiply, entries, weight)


def _bce_backward(al: Numbers, given: Given) -> Array:
    def slope(x: Element, t: Element) -> Element:
        denominator = al.maximum(al.multiply(x, al.subtract(1, x)), _LEAST_DENOMINATOR)
        return al.divide(al.subtract(x, t), denominator)

    slopes = _weighted(al, each(slope, given["self"], given["target"]), given["weight"])
    share = Fraction(1, slopes.size) if given["reduction"] == MEAN else 1
    return each(lambda g, s: al.multiply(share, al.multiply(g, s)), given["grad_output"], slopes)


def _bce_with_logits(al: Numbers, given: Given) -> Array:
    """-(p t log s + (1 - t) log(1 - s)) with s = sigmoid(x), and log(1 - s) = log s - x."""
    positive = 1 if given["pos_weight"] is None else given["pos_weight"]

    def entry(x: Element, t: Element, p: Element) -> Element:
        logged = log_sigmoid(al, x)
        yes = al.multiply(al.multiply(p, t), logged)
        return al.negative(al.add(yes, al.multiply(al.subtract(1, t), al.subtract(logged, x))))

    entries = each(entry, given["self"], given["target"], positive)
    return reduced(al, _weighted(al, entries, given["weight"]), given["reduction"])


def _log_sigmoid(al: Numbers, given: Given) -> Result:
    """The second output is for torch's own use."""
    return each(lambda x: log_sigmoid(al, x), given["self"]), None


def _log_sigmoid_backward(al: Numbers, given: Given) -> Array:
    def back(g: Element, x: Element) -> Element:
        return al.multiply(g, sigmoid(al, al.negative(x)))

    return each(back, given["grad_output"], given["self"])


def _logit(al: Numbers, given: Given) -> Array:
    eps = given["eps"]

    def entry(x: Element) -> Element:
        if eps is not None and eps >= 0:
            x = al.minimum(al.maximum(x, eps), 1 - Fraction(eps))
        return al.function("log", al.divide(x, al.subtract(1, x)))

    return each(entry, given["self"])


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.mse_loss.default": _loss(_mse),
        "aten.mse_loss_backward.default": _gradient(_mse_slope),
        "aten.smooth_l1_loss.default": _loss(_smooth_l1),
        "aten.smooth_l1_loss_backward.default": _gradient(_smooth_l1_slope),
        "aten.huber_loss.default": _loss(_huber),
        "aten.huber_loss_backward.default": _gradient(_huber_slope),
        "aten.soft_margin_loss.default": _loss(_soft_margin),
        "aten.soft_margin_loss_backward.default": _gradient(_soft_margin_slope),
        "aten.binary_cross_entropy.default": _bce,
        "aten.binary_cross_entropy_backward.default": _bce_backward,
        "aten.binary_cross_entropy_with_logits.default": _bce_with_logits,
        "aten.log_sigmoid_forward.default": _log_sigmoid,
        "aten.log_sigmoid_backward.default": _log_sigmoid_backward,
        "aten.logit.default": _logit,
    }
)
