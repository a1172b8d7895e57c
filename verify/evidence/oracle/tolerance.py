"""Bound the difference between shards and the whole that rounding can explain.

float64: a bound from the operator itself. It runs once more in float32; how far that is from the float64 run is its
rounding noise, conditioning included, and float64's is smaller by the ratio of the units of rounding. A multiple of it,
and no less than 64 units of the largest value, is rounding; a wrong annotation is off by a good part of the value.

float32, bfloat16: a multiple of the noise of a run in that dtype. They test how the operator treats dtypes; float64
decides whether the annotation is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

import torch
from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import (
    FAMILY_SHARE,
    as_real,
    is_finite,
    largest_beside_fill,
    largest_finite,
)
from verify.evidence.oracle.run_whole_operator import WholeRun

UNITS = 64.0  # the worst of 23,000 correct float64 cases was 14 units of the largest value
NOISE_FACTOR = 16.0
LOW_CEILINGS = MappingProxyType({torch.float32: 0.02, torch.bfloat16: 0.25})
BEYOND_DRAWN = 1e10  # times what was drawn: what fills masked places, which says nothing of the rounding beside it
CEILING = 1e-8  # of the largest value: no float64 difference above it is called rounding


@dataclass(frozen=True, slots=True)
class Bound:
    """`relative`: the largest difference that agrees, relative to the larger of the expected tensor's largest value and
    1e-3 of its family's. `rounding`: up to which one that does not may be rounding all the same, as after many steps
    of a recurrent network; it decides nothing. `fill`: beyond it, numbers that are the same on both sides are left out
    of the largest value."""

    relative: float
    rounding: float = 0.0
    fill: float = BEYOND_DRAWN

    def agree(self, a: Tensor, b: Tensor, scale: float, terms: float = 0.0) -> bool:
        """Return whether two tensors of one shape differ by rounding alone. Integers and booleans must be equal.

        `terms`: the largest value of the terms that were summed to `a`, which may cancel.
        """
        if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        gap = (a - b).abs()
        if bool(torch.isfinite(gap).all()):
            reference = max(largest_beside_fill(b, a == b, self.fill), FAMILY_SHARE * scale, terms)
            return bool((gap <= self.relative * reference).all())
        return self._agree_beyond(a, b)

    def _agree_beyond(self, a: Tensor, b: Tensor) -> bool:
        """Return whether infinities and NaNs stand in the same places, and finite values agree."""
        a, b = as_real(a), as_real(b)
        finite = torch.isfinite(b)
        if not torch.equal(torch.isfinite(a), finite):
            return False
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool((same | finite).all()):
            return False
        reference = largest_beside_fill(b, same, self.fill)
        return bool(torch.where(finite, (a - b).abs() <= self.relative * reference, True).all())


def noise(low: WholeRun, exact: WholeRun) -> float:
    """Measure how far a run in lower precision is from the float64 run, relative to each tensor's largest value."""
    worst, fill = 0.0, _fill(exact)
    pairs = [*zip(low.outputs, exact.outputs, strict=True), *zip(low.gradients, exact.gradients, strict=True)]
    for found, right in pairs:
        if found is None or right is None or not (right.is_floating_point() or right.is_complex()) or not right.numel():
            continue
        if found.shape != right.shape or not is_finite(found):
            return float("inf")
        filled = right.abs() > fill  # with another number in another dtype
        reference = max(largest_beside_fill(right, filled, fill), FAMILY_SHARE * exact.gradient_scale)
        if reference > 0:
            worst = max(worst, float((found.to(right.dtype) - right).abs().where(~filled, 0.0).max()) / reference)
    return worst


def _fill(run: WholeRun) -> float:
    """Return the number beyond which one is no result of what was drawn for this run."""
    drawn = (*run.concrete.tensors, *run.cotangents)
    return BEYOND_DRAWN * max([1.0, *(largest_finite(t) for t in drawn if t is not None)])


def float64_bound(low: WholeRun | None, exact: WholeRun, moved: WholeRun | None = None) -> Bound:
    """`low`: the same run in float32; `moved`: the same in float64 with every input moved by one unit of rounding,
    which shows cancellation that float32 hides (a softmax that is saturated in it). None where there is no such run."""
    unit = torch.finfo(torch.float64).eps
    in_low, in_moved = (0.0 if run is None else noise(run, exact) for run in (low, moved))
    measured = max(in_low * unit / torch.finfo(torch.float32).eps, in_moved)
    # an operator that jumps where it is moved, at whole numbers say, has no noise in float32
    rounding = NOISE_FACTOR * min(in_low, in_moved)
    relative = min(max(UNITS * unit, NOISE_FACTOR * measured), CEILING)
    return Bound(relative, rounding if isfinite(rounding) else 0.0, _fill(exact))


def low_bound(low: WholeRun, exact: WholeRun) -> Bound:
    """Bound the rounding of shards in the dtype of `low`.

    Limited: an operator that is wrong in this dtype alone is far from its float64 run, and that is no noise.
    """
    unit = torch.finfo(low.dtype).eps
    relative = min(NOISE_FACTOR * max(unit, noise(low, exact)), LOW_CEILINGS.get(low.dtype, 0.25))
    return Bound(relative, fill=_fill(exact))
