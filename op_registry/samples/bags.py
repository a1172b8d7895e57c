"""Samples: sums of rows of a table."""

from __future__ import annotations

from op_registry.samples.sample import F, I, S, Sample, Tensor

_STARTS = Tensor((5,), "starts", 18)

SAMPLES: tuple[Sample, ...] = (
    S("nnscaler.embedding_bag", F(24, 18), I(12, 6, high=24), None, splits="b d l v"),
    S("nnscaler.embedding_bag", F(24, 18), I(12, 6, high=24), F(12, 6), splits="b d l v"),
    S("nnscaler.embedding_bag", F(24, 12), I(18, 6, high=24), None, 5, splits="b d l v"),
    S("nnscaler.embedding_bag", F(12, 18), I(24, 6, high=12), F(24, 6), 0, splits="b d l v"),
    S("embedding_bag", F(24, 12), I(18, high=24), _STARTS, splits="d"),
    S("embedding_bag", F(24, 12), I(18, high=24), _STARTS, False, 1, False, None, splits="d"),
    S("embedding_bag.padding_idx", F(24, 12), I(18, high=24), _STARTS, False, 0, False, F(18), False, 3, splits="d"),
    S("embedding_bag.padding_idx", F(24, 12), I(18, high=24), _STARTS, False, 2, False, None, False, 3, splits="d"),
    S("embedding_bag.padding_idx", F(24, 18), I(18, high=24), _STARTS, True, 1, False, None, False, None, splits="d"),
)
