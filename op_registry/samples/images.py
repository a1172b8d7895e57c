"""Samples: places of convolutions and pooling, resizing, sampling, columns."""

from __future__ import annotations

from op_registry.samples.sample import F, I, S, Sample

_PATCHES: tuple[Sample, ...] = (
    S("conv1d", F(4, 6, 24), F(12, 6, 4), F(12), [4], splits="b c o p0"),
    S("conv1d", F(4, 6, 12), F(8, 6, 1), F(8), splits="b c o p0"),
    S("conv1d", F(4, 6, 24), F(8, 6, 1), None, [2], splits="b c o p0"),
    S("conv2d", F(4, 6, 24, 12), F(8, 6, 4, 2), F(8), [4, 2], splits="b c o p0 p1"),
    S("conv2d", F(4, 6, 12, 6), F(24, 1, 1, 1), F(24), groups=6, splits="b g o p0 p1"),
    S("conv3d", F(4, 6, 12, 6, 8), F(8, 6, 2, 1, 2), None, [2, 1, 2], splits="b c o p0 p1 p2"),
    S("conv_transpose1d", F(4, 6, 12), F(6, 8, 2), F(8), [2], splits="b c o p0"),
    S("conv_transpose2d.input", F(4, 6, 6, 12), F(6, 8, 2, 3), F(8), [2, 3], splits="b c o p0 p1"),
    S("conv_transpose2d.input", F(4, 6, 6, 12), F(6, 8, 1, 2), None, [2, 3], [0, 0], [1, 1], splits="b c o p0 p1"),
)

_OVERLAPS: tuple[Sample, ...] = (
    S("conv1d", F(4, 6, 12), F(8, 6, 3), F(8), [1], [1], splits="b c o y0"),
    S("conv1d", F(4, 6, 12), F(8, 6, 5), None, [2], [2], [1], splits="b c o y0"),
    S("conv1d", F(4, 6, 24), F(12, 1, 4), F(12), [1], [3], [2], 6, splits="b g o y0"),
    S("conv1d.padding", F(4, 6, 12), F(8, 6, 4), F(8), [1], "same", splits="b c o y0"),
    S("conv1d.padding", F(4, 6, 12), F(8, 6, 2), None, [1], "same", [3], splits="b c o y0"),
    S("conv1d.padding", F(4, 6, 14), F(8, 6, 3), padding="valid", splits="b c o y0"),
    S("conv2d", F(4, 6, 12, 6), F(8, 6, 3, 3), F(8), [1, 1], [1, 1], splits="b c o y0 y1"),
    S("conv2d", F(2, 4, 12, 12), F(8, 4, 5, 2), F(8), [2, 2], [2, 0], splits="b c o y0 p1"),
    S("conv2d", F(4, 6, 13, 10), F(8, 6, 3, 3), stride=[2, 1], dilation=[1, 2], splits="b c o y0 y1"),
    S("conv2d.padding", F(4, 6, 6, 12), F(12, 1, 2, 4), F(12), [1, 1], "same", [1, 1], 6, splits="b g o y0 y1"),
    S("conv3d", F(2, 4, 6, 8, 6), F(2, 4, 3, 2, 1), F(2), [1, 2, 1], [1, 0, 0], splits="b c o y0 p1 p2"),
    S("conv_transpose1d", F(4, 6, 7), F(6, 8, 3), F(8), [2], [1], [0], 1, [2], splits="b c o"),
    S("conv_transpose1d", F(4, 6, 6), F(6, 8, 3), F(8), [2], [1], [1], splits="b c o y0"),
    S("conv_transpose1d", F(4, 6, 6), F(6, 4, 4), None, [2], [1], [0], 6, splits="b g o y0"),
    S("conv_transpose2d.input", F(4, 6, 6, 6), F(6, 8, 4, 3), F(8), [2, 1], [1, 1], splits="b c o y0 y1"),
    S(
        "conv_transpose2d.input",
        F(4, 6, 4, 5),
        F(6, 8, 2, 2),
        None,
        [3, 2],
        [0, 1],
        [0, 2],
        1,
        [2, 3],
        splits="b c o p0 y1",
    ),
    S("conv_transpose3d.input", F(2, 4, 6, 2, 3), F(4, 6, 3, 2, 2), F(6), [1, 2, 2], [1, 0, 0], splits="b c o p1 y0"),
    # groups of several channels, inwards and outwards
    S("conv1d", F(2, 8, 7), F(8, 4, 3), groups=2, splits="b c g o"),
    S("conv1d.padding", F(2, 8, 6), F(8, 4, 3), F(8), [1], "same", [1], 2, splits="b c g o y0"),
    S("conv1d.padding", F(2, 8, 6), F(8, 4, 3), None, [1], "same", [1], 2, splits="b c g o y0"),
    S("conv2d", F(2, 8, 5, 5), F(8, 4, 3, 2), F(8), groups=2, splits="b c g o y1"),
    S("conv2d", F(2, 8, 5, 5), F(8, 4, 3, 2), groups=2, splits="b c g o y1"),
    S("conv2d.padding", F(2, 8, 5, 4), F(8, 4, 3, 2), F(8), [1, 1], "same", [1, 1], 2, splits="b c g o y1"),
    S("conv2d", F(2, 8, 4, 3), F(8, 4, 1, 1), F(8), groups=2, splits="b c g o p0"),
    S("conv3d", F(2, 8, 4, 6, 3), F(8, 4, 2, 3, 1), F(8), groups=2, splits="b c g o y1"),
    S("conv_transpose1d", F(2, 8, 4), F(8, 4, 3), F(8), groups=2, splits="b c g o y0"),
    S("conv_transpose1d", F(2, 8, 4), F(8, 4, 3), groups=2, splits="b c g o y0"),
    S("conv_transpose2d.input", F(2, 8, 3, 3), F(8, 4, 2, 2), F(8), groups=2, splits="b c g o y0 y1"),
    S("conv_transpose2d.input", F(2, 8, 3, 3), F(8, 4, 2, 2), groups=2, splits="b c g o y0 y1"),
    S("conv_transpose3d.input", F(2, 8, 2, 3, 3), F(8, 4, 2, 2, 2), F(8), groups=2, splits="b c g o y1 y2"),
)

_POOLS: tuple[Sample, ...] = (
    S("avg_pool1d", F(4, 6, 24), [2], splits="a b p0"),
    S("avg_pool1d", F(4, 6, 12), [3], [1], [1], splits="a b y0"),
    S("avg_pool1d", F(4, 6, 12), [3], [1], [1], False, False, splits="a b"),
    S("avg_pool1d", F(4, 6, 12), [3], [2], [0], True, splits="a b"),
    S("avg_pool2d", F(4, 6, 12, 24), [2, 4], splits="a b p0 p1"),
    S("avg_pool2d", F(4, 6, 13, 12), [3, 2], [2, 2], [0, 0], False, False, 5, splits="a b y0 p1"),
    S("avg_pool2d", F(4, 6, 12, 12), [3, 3], [2, 1], [1, 1], divisor_override=4, splits="a b y0 y1"),
    S("avg_pool3d", F(2, 4, 6, 8, 6), [3, 2, 1], [1, 2, 1], [1, 0, 0], splits="a b y0 p1 p2"),
    S("max_pool1d", F(4, 6, 24), [2], splits="a b p0"),
    S("max_pool1d", F(4, 6, 12), [3], [2], [1], splits="a b y0"),
    S("max_pool1d", F(4, 6, 24), [3], [2], [0], [1], True, splits="a b y0"),
    S("max_pool1d", F(4, 6, 14), [2], [1], [0], [2], splits="a b y0"),
    S("max_pool2d", F(4, 6, 12, 24), [3, 2], [2, 2], [1, 0], splits="a b y0 p1"),
    S("max_pool3d", F(2, 4, 6, 6, 12), [3, 1, 2], [1, 1, 2], [1, 0, 0], splits="a b y0 p1 p2"),
    S("adaptive_avg_pool1d", F(4, 6, 12), [1], splits="a b k0"),
    S("adaptive_avg_pool1d", F(4, 6, 24), [6], splits="a b p0"),
    S("adaptive_avg_pool2d", F(4, 6, 8, 12), [1, 1], splits="a b k0 k1"),
    S("adaptive_avg_pool2d", F(4, 6, 12, 12), [12, 1], splits="a b p0 k1"),
    S("adaptive_avg_pool2d", F(4, 6, 12, 8), [6, 1], splits="a b p0"),
    S("adaptive_avg_pool2d", F(4, 6, 12, 18), [6, 4], splits="a b p0"),
    S("adaptive_avg_pool3d", F(2, 4, 6, 4, 12), [1, 1, 1], splits="a b k0 k1 k2"),
    S("max_unpool2d", F(4, 6, 1, 3), I(4, 6, 1, 3, high=1), [4, 6], splits="a b"),
    S("max_unpool3d", F(4, 6, 1, 2, 1), I(4, 6, 1, 2, 1, high=1), [2, 4, 2], [2, 2, 2], [0, 0, 0], splits="a b"),
)

_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")

_RESIZED: tuple[Sample, ...] = (
    *(S(f"{name}1d.vec", F(4, 6, 12), None, [2.0], splits="a b p0") for name in _NEAREST),
    *(S(f"{name}2d.vec", F(4, 6, 6, 4), [12, 16], None, splits="a b p0 p1") for name in _NEAREST),
    *(S(f"{name}2d.vec", F(4, 6, 6, 4), [18, 8], None, splits="a b p1") for name in _NEAREST),
    *(S(f"{name}3d.vec", F(2, 4, 6, 4, 4), None, [2.0, 4.0, 1.0], splits="a b p0 p1 p2") for name in _NEAREST),
    *(S(f"{name}1d", F(4, 6, 12), [24], splits="a b p0") for name in _NEAREST),
    *(S(f"{name}2d", F(4, 6, 6, 4), [12, 8], 2.0, None, splits="a b p0 p1") for name in _NEAREST),
    *(S(f"{name}2d", F(4, 6, 6, 4), [12, 8], 1.9, 2.0, splits="a b p1") for name in _NEAREST),
    *(S(f"{name}3d", F(2, 4, 6, 4, 4), [12, 8, 4], splits="a b p0 p1 p2") for name in _NEAREST),
    S("upsample_linear1d", F(4, 6, 12), [24], False, splits="a b"),
    S("upsample_bilinear2d", F(4, 6, 4, 5), [8, 7], True, splits="a b"),
    S("upsample_bicubic2d", F(4, 6, 4, 5), [8, 7], False, 2.0, 1.5, splits="a b"),
    S("upsample_trilinear3d", F(2, 4, 2, 3, 2), [3, 4, 2], False, splits="a b"),
    *(S(f"_upsample_{name}2d_aa", F(4, 6, 4, 5), [8, 3], False, splits="a b") for name in ("bilinear", "bicubic")),
    *(S(f"_upsample_{n}2d_aa.vec", F(4, 6, 4, 5), [2, 7], False, None, splits="a b") for n in ("bilinear", "bicubic")),
)

_SAMPLED: tuple[Sample, ...] = (
    *(S("grid_sampler", F(4, 6, 5, 7), F(4, 12, 8, 2), *o, splits="b c a d") for o in ((0, 0, False), (1, 1, True))),
    S("grid_sampler", F(4, 6, 5, 7), F(4, 12, 8, 2), 2, 2, False, splits="b c a d"),
    S("grid_sampler", F(2, 4, 3, 5, 2), F(2, 6, 2, 4, 3), 0, 0, False, splits="b c a d e"),
    S("affine_grid_generator", F(12, 2, 3), [12, 3, 5, 7], False, splits="b"),
    S("affine_grid_generator", F(12, 3, 4), [12, 3, 2, 5, 7], True, splits="b"),
    S("im2col", F(4, 6, 12, 8), [2, 4], [1, 1], [0, 0], [2, 4], splits="*0 c h w"),
    S("im2col", F(6, 12, 8), [2, 2], [1, 1], [0, 0], [2, 2], splits="c h w"),
    S("col2im", F(4, 48, 12), [12, 8], [2, 4], [1, 1], [0, 0], [2, 4], splits="*0 c h w"),
    S("col2im", F(24, 12), [6, 8], [2, 2], [1, 1], [0, 0], [2, 2], splits="c w"),
    S("col2im", F(4, 24, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1], splits="*0 c"),
    S("col2im", F(4, 24, 42), [5, 6], [2, 2], [1, 1], [1, 1], [1, 1], splits="*0 c"),
)

SAMPLES: tuple[Sample, ...] = (*_PATCHES, *_OVERLAPS, *_POOLS, *_RESIZED, *_SAMPLED)
