"""Semantics of reductions, scans and products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from types import MappingProxyType

import numpy as np

from op_registry.builtin._name_and_broadcast_dims import whole, whole_dims

from verify.evidence.smt.element_arithmetic import Element, Numbers, Unsupported
from verify.evidence.smt.semantics.element_arrays import (
    Array,
    Given,
    Rule,
    array,
    each,
    filled,
    lanes,
)


def over(x: Array, dims: Sequence[int], function: Callable[[list[Element]], Element], shape: Sequence[int]) -> Array:
    """Return one element for all entries of `x` along `dims`; `shape` is the result's, with or without them."""
    rows, left = lanes(x, dims)
    return array([function(list(row)) for row in rows.reshape(-1, rows.shape[-1])], left).reshape(tuple(shape))


def _sum(al: Numbers, given: Given) -> Array:
    x = given["self"]
    return over(x, whole_dims(given.get("dim"), x.ndim), al.sum, given.shape)


def _mean(al: Numbers, given: Given) -> Array:
    x = given["self"]
    return over(x, whole_dims(given.get("dim"), x.ndim), lambda row: mean_of(al, row), given.shape)


def mean_of(al: Numbers, items: Sequence[Element]) -> Element:
    """Return the arithmetic mean of at least one element."""
    return al.multiply(Fraction(1, len(items)), al.sum(items))


def variance_of(al: Numbers, items: Sequence[Element], correction: Element) -> Element:
    """Return the sum of squared distances to the mean, over the number of items less `correction`."""
    mean = al.named(mean_of(al, items))
    distances = [al.subtract(item, mean) for item in items]
    return al.divide(al.dot(distances, distances), len(items) - correction)


def _variance(al: Numbers, given: Given) -> Array:
    x = given["self"]
    correction = given.get("correction", 1)
    return over(x, whole_dims(given.get("dim"), x.ndim), lambda row: variance_of(al, row, correction), given.shape)


def _variance_and_mean(al: Numbers, given: Given) -> tuple[Array, Array]:
    return _variance(al, given), _mean(al, given)


def _largest(al: Numbers, given: Given) -> Array:
    x = given["self"]
    return over(x, whole_dims(given.get("dim"), x.ndim), lambda row: reduce(al.maximum, row), given.shape)


def _smallest(al: Numbers, given: Given) -> Array:
    x = given["self"]
    return over(x, whole_dims(given.get("dim"), x.ndim), lambda row: reduce(al.minimum, row), given.shape)


def _any(al: Numbers, given: Given) -> Array:
    x = given["self"]

    def some(row: list[Element]) -> Element:
        return reduce(al.either, [al.cast(e, "bool") for e in row], False)

    return over(x, whole_dims(given.get("dim"), x.ndim), some, given.shape)


def _product(al: Numbers, given: Given) -> Array:
    x = given["self"]
    return over(x, whole_dims(given.get("dim"), x.ndim), lambda row: reduce(al.multiply, row, 1), given.shape)


def _scan(function: Callable[[Numbers], Callable[[Element, Element], Element]]) -> Rule:
    def rule(al: Numbers, given: Given) -> Array:
        x = given["self"]
        if x.ndim == 0:
            return filled((), x[()])
        result = np.moveaxis(x, whole(given["dim"], x.ndim), 0).copy()
        for i in range(1, len(result)):
            result[i] = each(function(al), result[i - 1], result[i])
        return np.moveaxis(result, 0, whole(given["dim"], x.ndim))

    return rule


def product(al: Numbers, a: Array, b: Array) -> Array:
    """Multiply [..., m, k] by [..., k, n], with the same leading dims."""
    lead, m, n = a.shape[:-2], a.shape[-2], b.shape[-1]
    left, right = a.reshape(-1, m, a.shape[-1]), b.reshape(-1, b.shape[-2], n)
    items = [al.dot(list(row), list(right[i, :, j])) for i in range(len(left)) for row in left[i] for j in range(n)]
    return array(items, (*lead, m, n))


def _mm(al: Numbers, given: Given) -> Array:
    return product(al, given["self"], given["mat2"])


def _addmm(al: Numbers, given: Given) -> Array:
    a, b = (given["mat1"], given["mat2"]) if "mat1" in given.arguments else (given["batch1"], given["batch2"])
    beta, alpha = given["beta"], given["alpha"]
    if beta == 0:
        raise Unsupported("beta=0 ignores even NaN")

    def fused(x: Element, y: Element) -> Element:
        return al.add(al.multiply(beta, x), al.multiply(alpha, y))

    return each(fused, given["self"], product(al, a, b))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.sum.dim_IntList": _sum,
        "aten.mean.default": _mean,
        "aten.mean.dim": _mean,
        "aten.var.correction": _variance,
        "aten.var_mean.correction": _variance_and_mean,
        "aten.amax.default": _largest,
        "aten.amin.default": _smallest,
        "aten.max.default": _largest,
        "aten.min.default": _smallest,
        "aten.any.default": _any,
        "aten.any.dim": _any,
        "aten.any.dims": _any,
        "aten.prod.default": _product,
        "aten.prod.dim_int": _product,
        "aten.cumsum.default": _scan(lambda al: al.add),
        "aten.cumprod.default": _scan(lambda al: al.multiply),
        "aten.mm.default": _mm,
        "aten.bmm.default": _mm,
        "aten.addmm.default": _addmm,
    }
)
