"""Samples: convolutions, pooling, resizing."""

from __future__ import annotations

from op_registry.samples.sample import F, S, Sample

_CONVOLUTIONS: tuple[Sample, ...] = (
    S("conv1d", F(18, 6, 7), F(12, 6, 3), splits="b c o"),
    S("conv1d", F(18, 6, 7), F(12, 6, 3), F(12), [1], [1], splits="b c o"),
    S("conv1d", F(18, 24, 7), F(24, 1, 3), F(24), [1], [1], [1], 24, splits="b g"),
    S("conv1d", F(18, 36, 7), F(72, 6, 3), F(72), [1], [1], [1], 6, splits="b c g o"),
    S("conv1d", F(6, 7), F(12, 6, 3), F(12), splits="c o"),
    S("conv1d.padding", F(18, 6, 7), F(12, 6, 3), F(12), [1], "same", splits="b c o"),
    S("conv1d.padding", F(18, 12, 7), F(12, 1, 3), F(12), [1], "same", [1], 12, splits="b g"),
    S("conv2d", F(18, 6, 8, 7), F(12, 6, 4, 3), F(12), [2, 1], splits="b c o"),
    S("conv2d", F(18, 6, 8, 7), F(12, 6, 4, 3), None, [1, 1], [1, 2], [2, 1], splits="b c o"),
    S("conv2d", F(18, 12, 5, 7), F(24, 2, 3, 3), F(24), [1, 1], [1, 1], [1, 1], 6, splits="b c g o"),
    S("conv2d", F(18, 12, 5, 7), F(24, 2, 3, 3), groups=6, splits="b c g o"),
    S("conv2d.padding", F(18, 6, 8, 7), F(12, 6, 4, 3), F(12), [1, 1], "same", splits="b c o"),
    S("conv2d.padding", F(18, 6, 8, 7), F(12, 6, 4, 3), None, [1, 1], "valid", splits="b c o"),
    S("conv3d", F(18, 6, 4, 5, 3), F(12, 6, 2, 3, 1), F(12), splits="b c o"),
    S("conv3d.padding", F(18, 6, 4, 5, 3), F(12, 6, 2, 3, 1), F(12), [1, 1, 1], "valid", splits="b c o"),
    S("conv_transpose1d", F(18, 6, 7), F(6, 12, 3), F(12), [2], splits="b c o"),
    S("conv_transpose2d.input", F(18, 6, 5, 7), F(6, 12, 3, 2), F(12), [2, 1], [1, 0], [1, 0], splits="b c o"),
    S("conv_transpose2d.input", F(18, 12, 5, 7), F(12, 4, 3, 2), F(24), [1, 1], [0, 0], [0, 0], 6, splits="b c g o"),
    S("conv_transpose3d.input", F(18, 6, 2, 3, 2), F(6, 12, 1, 2, 2), splits="b c o"),
    S("im2col", F(18, 6, 5, 7), [3, 2], [1, 1], [1, 0], [1, 2], splits="*0 c"),
)

_POOLS: tuple[Sample, ...] = (
    S("avg_pool1d", F(6, 12, 8), [2], splits="a b"),
    S("avg_pool2d", F(6, 12, 8, 9), [2, 3], [2, 3], [1, 1], False, True, splits="a b"),
    S("avg_pool3d", F(6, 12, 4, 4, 6), [2, 2, 3], splits="a b"),
    S("adaptive_avg_pool1d", F(6, 12, 8), [1], splits="a b"),
    S("adaptive_avg_pool2d", F(6, 12, 8, 9), [1, 1], splits="a b"),
    S("adaptive_avg_pool2d", F(6, 12, 8, 9), [3, 4], splits="a b"),
    S("max_pool1d", F(6, 12, 8), [2], splits="a b"),
    S("max_pool2d", F(6, 12, 8, 9), [3, 3], [2, 2], [1, 1], splits="a b"),
    S("max_pool2d", F(12, 8, 9), [3, 3], splits="a"),
    S("max_pool3d", F(6, 12, 4, 4, 6), [2, 2, 3], splits="a b"),
    S("max_pool2d_with_indices", F(6, 12, 8, 9), [3, 3], [2, 2], splits="a b"),
    S("adaptive_max_pool1d", F(6, 12, 8), [2], splits="a b"),
    S("adaptive_max_pool2d", F(6, 12, 8, 9), [2, 3], splits="a b"),
    S("upsample_nearest1d.vec", F(6, 12, 8), [12], None, splits="a b"),
    S("upsample_nearest2d.vec", F(6, 12, 4, 5), None, [2.0, 2.0], splits="a b"),
    S("upsample_linear1d.vec", F(6, 12, 8), [12], False, None, splits="a b"),
    S("upsample_bilinear2d.vec", F(6, 12, 4, 5), [8, 7], False, None, splits="a b"),
    S("upsample_bicubic2d.vec", F(6, 12, 4, 5), [8, 7], True, None, splits="a b"),
    S("glu", F(6, 24), splits="a b"),
    S("glu", F(6, 24, 12), 1, splits="a b c"),
)

SAMPLES: tuple[Sample, ...] = (*_CONVOLUTIONS, *_POOLS)
