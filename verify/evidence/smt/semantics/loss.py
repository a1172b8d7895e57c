"""Semantics of losses that work entry by entry, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from verify.evidence.smt.element_arithmetic import Element, Numbers
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, array, each

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


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.mse_loss_backward.default": _gradient(_mse_slope),
        "aten.smooth_l1_loss.default": _loss(_smooth_l1),
        "aten.smooth_l1_loss_backward.default": _gradient(_smooth_l1_slope),
        "aten.huber_loss_backward.default": _gradient(_huber_slope),
    }
)
