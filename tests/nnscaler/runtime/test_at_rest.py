"""Gradients are cut into the shards of a bucket, and parameters joined from them, wherever the parts of ranks lie."""

from __future__ import annotations

import pytest
import torch

from nnscaler.runtime.training.gradients.buckets import DivisionBucket
from nnscaler.runtime.training.zero_1_2_and_master_weights import Division, Slots, _side_by_side, join, unflattened

EVEN: Slots = (slice(0, 2), slice(2, 4), slice(4, 6))
UNEVEN: Slots = (slice(0, 3), slice(3, 6), slice(0, 0))  # nothing is left for the last rank
APART: Slots = (torch.tensor([0, 3]), torch.tensor([1, 4]), torch.tensor([2, 5]))
TURNED: Slots = (slice(2, 4), slice(0, 2), slice(4, 6))


def division(slots: Slots, dim: int) -> Division:
    lengths = [s.stop - s.start if isinstance(s, slice) else len(s) for s in slots]
    shapes = tuple((n, 5) if dim == 0 else (5, n) for n in lengths)
    like = tuple(torch.empty(shape, device="meta") for shape in shapes)
    whole = (6, 5) if dim == 0 else (5, 6)
    return Division((0, 1, 2), 0, dim, slots, like, _side_by_side(slots, 6), True, whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_cut_is_joined_again(dim: int) -> None:
    divisions = [division(slots, dim) for slots in (EVEN, UNEVEN, APART, TURNED)]
    assert [d.lengths for d in divisions] == [(2, 2, 2), (3, 3, 0), None, None]
    gradients = [torch.randn(d.whole) for d in divisions]
    bucket = DivisionBucket(("a", "b", "c", "d"), divisions, torch.float32, torch.device("cpu"))
    for position in (2, 0, 3, 1):
        bucket.take(position, gradients[position])
    for rank, piece in enumerate(bucket._pieces):  # what is sent
        own = [d.part(gradient, rank).reshape(-1) for d, gradient in zip(divisions, gradients, strict=True)]
        assert torch.equal(piece, torch.cat(own))
    wholes = [torch.zeros(d.whole) for d in divisions]
    parts = zip(*(unflattened(p, [d.like[r] for d in divisions]) for r, p in enumerate(bucket._pieces)), strict=True)
    join(divisions, wholes, list(parts))
    assert all(torch.equal(whole, gradient) for whole, gradient in zip(wholes, gradients, strict=True))


def test_views_of_parts_without_elements_keep_their_shape() -> None:
    like = [torch.empty(2, 3, device="meta"), torch.empty(0, 3, device="meta"), torch.empty((), device="meta")]
    assert [tuple(view.shape) for view in unflattened(torch.zeros(7), like)] == [(2, 3), (0, 3), ()]
