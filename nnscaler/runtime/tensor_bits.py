"""The values of a tensor in memory, one after another, and their bits.

A view that conjugates or negates (`x.conj()`, and the `.imag` of one) has other values than its memory, and torch gives
its bits to nobody. What sends, hashes or compares memory takes it from here.
"""

from __future__ import annotations

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
    """Equality of numbers: NaN equals itself, and -0.0 is 0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
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
