"""Samples: more ways to cut, join and turn."""

from __future__ import annotations

from op_registry.samples.sample import F, I, S, Sample, Tensor

SAMPLES: tuple[Sample, ...] = (
    S("moveaxis.int", F(6, 12, 18), 0, 2, splits="a b c"),
    S("moveaxis.intlist", F(6, 12, 18), [0, 1], [2, 0], splits="a b c"),
    S("swapdims", F(6, 12, 18), 0, -1, splits="a b c"),
    S("adjoint", Tensor((6, 12, 18), "complex"), splits="a b c"),
    S("mH", F(6, 12), splits="a b"),
    S("rot90", F(6, 5, 4), 1, [1, 2], splits="a"),
    S("rot90", F(3, 4), 2),
    S("flipud", F(5, 12), splits="b"),
    S("fliplr", F(12, 5), splits="a"),
    S("diag_embed", F(6, 12, 4), splits="a b"),
    S("diag_embed", F(6, 12, 4), 1, 0, 2, splits="a b"),
    S("channel_shuffle", F(6, 24, 12), 6, splits="b g c x0"),
    S("channel_shuffle", F(6, 24, 12, 4), 4, splits="b g c x0 x1"),
    S("unfold", F(6, 24, 12), 1, 4, 4, splits="a b c"),
    S("unfold", F(24), -1, 2, 2, splits="a"),
    S("hstack", [F(6, 12, 4), F(6, 18, 4)], splits="a b0 b1 c"),
    S("hstack", [F(12), F(12)], splits="a"),
    S("vstack", [F(6, 12), F(18, 12)], splits="a0 a1 b"),
    S("vstack", [F(12), F(12)], splits="a"),
    S("tensor_split.sections", F(6, 36), 3, -1, splits="a b"),
    S("tensor_split.sections", F(6, 13), 3, 1, splits="a"),
    S("tensor_split.indices", F(6, 30), [12, -6], 1, splits="a b0 b1 b2"),
    S("tensor_split.indices", F(6, 30), [12, 40], dim=-1, splits="a"),
    S("unsafe_split.Tensor", F(6, 24), 12, 1, splits="a b"),
    S("unsafe_split_with_sizes", F(6, 18), [6, 12], -1, splits="a b0 b1"),
    S("unsafe_chunk", F(12, 18), 2, splits="a b"),
    S("ravel", F(6, 4, 12), splits="a b c"),
    S("ravel", I(6), splits="a"),
)
