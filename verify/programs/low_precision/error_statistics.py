"""Measure the difference of two tensors, in three numbers that see different errors.

    greatest   the largest absolute difference, relative to the largest value: one wrong element
    norm       the Frobenius norm of the difference, relative to the tensor's own: permuted, missing or foreign pieces
    factor     how far the best factor `a = f e` is from 1: everything a little too large. Rounding errors of N elements
               cancel in it, so that it sees errors that are sqrt(N) times smaller than the noise of one element.

Each relates to the larger of the tensor itself and a thousandth of its family (see `verify.results.tolerance`): a
gradient that is zero in theory has no scale of its own.
"""

from __future__ import annotations

from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from nnscaler.runtime.tensor_values import FAMILY_SHARE, difference, is_finite, real_numbers

NAMES = ("greatest", "norm", "factor")
Statistics = tuple[float, float, float]


def statistics(actual: Tensor, expected: Tensor, family: float) -> Statistics:
    """Return the three numbers, in the order of NAMES; infinity for unequal shapes, and where `actual`
    is not finite."""
    greatest = difference(actual, expected, family).relative
    if actual.shape != expected.shape or not is_finite(actual) or not is_finite(expected):
        return (inf, inf, inf) if greatest > 0 else (0.0, 0.0, 0.0)
    e = real_numbers(expected)
    gap = real_numbers(actual) - e
    scale = max(_norm(e), FAMILY_SHARE * family * sqrt(e.numel()))
    if scale == 0:
        return (greatest, greatest, greatest)
    return (greatest, _norm(gap) / scale, abs(float((gap * e).sum())) / scale**2)


def floors(expected: Tensor, unit: float) -> Statistics:
    """Return the three statistics of rounding the right result once to the dtype. `unit`: half an epsilon."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return (0.0, 0.0, 0.0)
    square = real_numbers(expected).square()
    total = float(square.sum())
    # the errors of the elements are independent: their sum grows with the root of how many there are
    spread = sqrt(float(square.square().sum())) / total if total > 0 and isfinite(total) else 1.0
    return (unit, unit, unit * spread)


def size(expected: Tensor, family: float) -> float:
    """Return the tensor's own size relative to the scale that `norm` uses: 1 unless it is (almost) zero in theory."""
    e = real_numbers(expected)
    own = _norm(e)
    scale = max(own, FAMILY_SHARE * family * sqrt(e.numel()))
    return own / scale if scale > 0 else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0
