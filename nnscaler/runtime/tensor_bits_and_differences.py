"""The bits of a tensor, its values in memory one after another, and the differences between two tensors.

A view that conjugates or negates (`x.conj()`, and the `.imag` of one) has other values than its memory, and torch gives
its bits to nobody. What sends, hashes or compares memory takes it from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, Tensor | None)


def values_of(tensor: Tensor) -> Tensor:
    """Return a strided tensor, contiguous and detached, whose memory is its values; the tensor's own where it may."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, in one more dim; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bits_of(tensor: Tensor) -> Tensor:
    """Return the values of a strided tensor as bytes, as [bytes], on its device."""
    return values_of(tensor).reshape(-1).view(torch.uint8)


def kept(tensor: T) -> T:
    """Return a detached copy on the CPU; None of none."""
    return None if tensor is None else tensor.detach().cpu().clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality: NaN equals itself, and -0.0 differs from 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equality of numbers: NaN equals itself, -0.0 is 0.0, and what a sparse tensor leaves out is 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t if t.layout == torch.strided else t.to_dense() for t in (a, b))
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def distance_of_copies(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return how many elements of two tensors of one shape have other bits, and by how much they differ at most:
    infinity where one is NaN."""
    common = torch.promote_types(a.dtype, b.dtype)
    elements = [bits_of(t.to(common)).view(a.numel(), common.itemsize) for t in (a, b)]
    unlike = (elements[0] != elements[1]).any(1)
    if not bool(unlike.any()):
        return 0, 0.0
    numbers = [values_of(t.to(common)).reshape(-1)[unlike] for t in (a, b)]
    gap = torch.stack([as_real(n) for n in numbers]).double().diff(dim=0).abs()
    return int(unlike.sum()), float(gap.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


# How far two tensors differ: what the trace's self-check and every level of verification measure by.
# The largest absolute difference, relative to the larger of the expected tensor's own largest value and 1e-3 of the
# largest value of its whole family (all gradients, all parameters). The family matters: some gradients are exactly zero
# in theory (the bias of attention keys) and 1e-17 of rounding noise in practice; relative to themselves they never
# agree.
# What fills masked places (-1e9, or the least number of a dtype) is no scale of what stands beside it: beyond FILL,
# what is the same on both sides is left out; and so is all of it in the family of parameters or of buffers, for a mask
# may be one of them. Whole numbers do not round: none of them is a scale that hides a difference of one.

FLOAT64_BOUND = 1e-9  # of differences that rounding in float64 explains: `verify.results.float64_tolerance` says why
FAMILY_SHARE = 1e-3
FILL = 1e6  # of what is as large as activations are


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A comparison of two tensors; the worst element is the one of the largest absolute difference.

    relative    the number above; inf where NaN, infinity or unequal shapes make a comparison pointless
    absolute    difference at the worst element
    index       of the worst element
    expected    the right value there
    actual      the value found there
    mismatched  elements that differ at all
    elements    elements that were compared
    problem     "shape (2, 3) instead of (3, 2)", "not finite"; empty where the values were compared
    """

    relative: float
    absolute: float = 0.0
    index: tuple[int, ...] = ()
    expected: float = 0.0
    actual: float = 0.0
    mismatched: int = 0  # elements that differ at all
    elements: int = 0
    problem: str = ""  # "shape (2, 3) instead of (3, 2)", "not finite"

    @property
    def not_finite(self) -> bool:
        """Return whether NaN or infinity was found where the right value is another one."""
        return self.relative == inf and not isfinite(self.actual)

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        at = f" at {self.index}" if self.index else ""
        return f"{self.actual:.10g} instead of {self.expected:.10g}{at}, relative difference {self.relative:.2g}"


def family_scale(tensors: Iterable[Tensor | None], fill: float = inf) -> float:
    """Return the largest finite absolute value in all of these that are not whole numbers, of those up to `fill`."""
    return max((largest_up_to(t, fill) for t in tensors if t is not None and not is_whole(t)), default=0.0)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, 0 for an empty tensor."""
    return float(_sizes(tensor).max()) if tensor.numel() else 0.0


def largest_finite(tensor: Tensor) -> float:
    """Return the largest absolute value that is finite, 0 where there is none."""
    return largest_up_to(tensor, inf)


def largest_up_to(tensor: Tensor, fill: float = FILL) -> float:
    """Return the largest finite absolute value that is not beyond `fill`, 0 where there is none."""
    greatest = largest(tensor)
    if isfinite(greatest) and greatest <= fill:
        return greatest
    sizes = _sizes(tensor)
    return largest(sizes[torch.isfinite(sizes) & (sizes <= fill)])


def _sizes(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    return (values.byte() if values.dtype == torch.bool else values).abs()


def largest_beside_fill(expected: Tensor, same: Tensor, fill: float = FILL) -> float:
    """Return the largest finite absolute value, without those beyond `fill` that are the `same` in what is compared."""
    values = expected.detach().abs()
    return largest(values.where(torch.isfinite(values) & ~(same & (values > fill)), 0.0))


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return is_whole(tensor) or bool(torch.isfinite(tensor).all())


def difference(actual: Tensor, expected: Tensor, scale: float = 0.0) -> TensorDifference:
    """Measure how far `actual` is from `expected`. `scale`: that of the family of tensors."""
    if actual.shape != expected.shape:
        return TensorDifference(inf, problem=f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if actual.numel() == 0:
        return TensorDifference(0.0)
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        first = real_numbers(expected.flatten()[:1]).flatten()[0].item()
        return TensorDifference(0.0, 0.0, (0,) * actual.dim(), first, first, 0, actual.numel())
    dtype = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    a, e = real_numbers(actual.to(dtype)), real_numbers(expected.to(dtype))
    if not is_finite(a) and is_finite(e):
        place = int(a.isfinite().flatten().byte().argmin())
        found, right = float(a.flatten()[place]), float(e.flatten()[place])
        return TensorDifference(inf, inf, (), right, found, elements=a.numel(), problem=_not_finite(a))
    same = (a == e) | (a.isnan() & e.isnan())
    gap = torch.where(same, 0.0, (a - e).abs())
    reference = max(largest_beside_fill(e, same), FAMILY_SHARE * scale)
    if is_whole(actual) and not expected.is_complex():
        unlike = actual.cpu() != expected.cpu()  # float64 does not tell large ones apart
        gap, reference = torch.where(unlike.view(gap.shape), gap.clamp_min(1.0), gap), min(reference, FILL)
    place = int(gap.argmax())
    absolute = float(gap.flatten()[place])
    relative = 0.0 if absolute == 0 else absolute / reference if reference > 0 else inf
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)) if a.dim() else ()
    return TensorDifference(
        relative if isfinite(relative) else inf,
        absolute,
        index,
        float(e.flatten()[place]),
        float(a.flatten()[place]),
        int((gap != 0).sum()),
        a.numel(),
    )


def is_whole(tensor: Tensor) -> bool:
    """Return whether its numbers are whole, or truth values: they do not round."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _not_finite(tensor: Tensor) -> str:
    count = int((~torch.isfinite(tensor)).sum())
    if tensor.numel() == 1:
        return f"{float(tensor)}"
    return f"{count} of {tensor.numel()} values are NaN or infinite"


def real_numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in float64, on the CPU; those of a complex one have one dim more."""
    return as_real(tensor.detach().cpu()).double()
