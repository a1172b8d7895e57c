"""Samples: embeddings, indexing, sorting, factories, losses."""

from __future__ import annotations

from op_registry.call import DType

from op_registry.samples.sample import B, C, F, I, P, S, Sample, Tensor, U

_EMBEDDING: tuple[Sample, ...] = (
    S("embedding", F(24, 18), I(6, 12, high=24), splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), 5, splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), 0, splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), padding_idx=23, splits="a b d v"),
    S("embedding", F(24, 18), I(high=24), splits="d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), -1, True, False),
    S("one_hot", I(6, 12, high=7), 7, splits="a b"),
    S("one_hot", I(6, 12, high=7)),
)

_INDEX: tuple[Sample, ...] = (
    S("index.Tensor", F(24, 6), [I(18, high=24)], splits="b c"),
    S("index.Tensor", F(24, 6), [I(18, 12, high=24)], splits="b c d"),
    S("index.Tensor", F(6, 12, 18), [None, I(24, high=12)], splits="a c d"),
    S("index.Tensor", F(6, 12), [I(18, 1, 1, high=6), I(1, 1, 24, high=12)], splits="c e"),
    S("index.Tensor", F(6, 12, 18), [I(24, high=6), None, I(24, high=18)], splits="b d"),
    S("index.Tensor", F(6, 12, 18), [None, I(24, high=12), I(24, high=18)], splits="a d"),
    S("index.Tensor", F(6, 12, 18, 24), [None, I(30, high=12), None, I(2, 30, high=24)], splits="a c e f"),
    S("index.Tensor", F(6, 12), [I(high=6)], splits="b"),
    S("index.Tensor", F(6, 12, 18), [B(6, 12)], splits="c"),
    S("index.Tensor", F(6, 12, 18), [None, B(12)], splits="a c"),
    S("index.Tensor", F(6, 12), [B(6), I(1, high=12)]),
    S("index_put", F(6, 12), [Tensor((6,), "distinct", 6)], F(6, 12), splits="b"),
    S("index_put", F(6, 12, 18), [None, Tensor((12,), "distinct", 12)], F(12, 1), splits="a c"),
    S("index_put", F(6, 12), [I(18, high=6)], F(18, 12), True, splits="b c"),
    S("index_put", F(6, 12, 24), [None, I(18, high=12)], F(18, 1), True, splits="a c d"),
    S("index_put", F(6, 12), [I(18, high=6), I(18, high=12)], F(), True, splits="c"),
    S("index_put", F(6, 12), [I(high=6), I(high=12)], F(), True),
    S("index_put", F(6, 12, 18), [B(6, 12)], F(), splits="a b c"),
    S("index_put", F(6, 12, 18), [None, B(12)], F(1), splits="a b c"),
    S("index_select", F(6, 12, 18), 1, I(24, high=12), splits="a bi c"),
    S("index_select", F(6, 12), -1, I(24, high=12), splits="a bi"),
    S("index_add", F(6, 12, 18), 1, I(24, high=12), F(6, 24, 18), splits="a bi c"),
    S("index_add", F(6, 12), 0, I(24, high=6), F(24, 12), alpha=0.5, splits="ai b"),
    S("index_copy", F(6, 12, 18), 1, Tensor((6,), "distinct", 12), F(6, 6, 18), splits="a c"),
    S("index_fill.int_Scalar", F(6, 12, 18), 1, I(4, high=12), 2.5, splits="a c"),
    S("index_fill.int_Tensor", F(6, 12), 1, I(4, high=12), F(), splits="a"),
    S("masked_scatter", F(6, 12), B(6, 12), F(80)),
    S("gather", F(6, 12, 18), 1, I(6, 24, 18, high=12), splits="a bi c"),
    S("gather", F(6, 12), -1, I(6, 24, high=12), splits="a bi"),
    S("gather", F(6, 12, 18), 1, I(2, 24, 18, high=12), splits="bi c"),
    S("scatter.src", F(6, 12, 18), 1, Tensor((6, 8, 18), "distinct", 12), F(6, 8, 18), splits="a c"),
    S("scatter.src", I(6, 12), 1, Tensor((6, 8), "distinct", 12), I(18, 9)),
    S("scatter.value", F(6, 12, 18), 1, I(6, 3, 18, high=12), 2.5, splits="a c"),
    S("scatter.value", F(6, 12), -1, I(4, 3, high=12), 0.0),
    S("scatter_add", F(6, 12, 18), 1, I(6, 24, 18, high=12), F(6, 24, 18), splits="a bi c"),
    S("scatter_add", I(6, 12), 0, I(24, 12, high=6), I(30, 18)),
    S("scatter_reduce.two", F(6, 12, 18), 1, I(6, 24, 18, high=12), F(6, 24, 18), "amax", splits="a c"),
    S("scatter_reduce.two", F(6, 12), 0, I(24, 12, high=6), F(24, 12), "sum", include_self=False, splits="b"),
    S("bucketize.Tensor", F(6, 12), Tensor((5,), "sorted"), splits="*0 *1"),
)

_SORT: tuple[Sample, ...] = (
    S("sort", F(6, 12, 18), 1, splits="a c"),
    S("sort", F(6, 12), descending=True, splits="a"),
    S("sort.stable", I(6, 12), stable=True, dim=0, splits="b"),
    S("argsort", F(6, 12), splits="a"),
    S("argsort.stable", F(6, 12), stable=True, dim=0, splits="b"),
    S("topk", F(6, 12, 18), 4, splits="a b"),
    S("topk", F(6, 12), 3, 0, splits="b"),
    S("histc", F(6, 12), 5, -1, 1),
)

_DOUBLE = DType("float64")

_FACTORIES: tuple[Sample, ...] = (
    S("arange", 12, splits="t"),
    S("arange", 12, dtype=_DOUBLE, splits="t"),
    S("arange.start", 5, 17, splits="t"),
    S("arange.start_step", 5, 40, 3, splits="t"),
    S("arange.start_step", 40, 5, -3, splits="t"),
    S("arange.start_step", 0, 23, 2, dtype=_DOUBLE, splits="t"),
    S("arange.start_step", 0.0, 1.2, 0.1),
    S("arange", 6.0),
    S("zeros", [6, 12], dtype=_DOUBLE, splits="a b"),
    S("zeros", [], dtype=_DOUBLE),
    S("ones", [6, 12], splits="a b"),
    S("full", [6, 12], 2.5, dtype=_DOUBLE, splits="a b"),
    S("empty.memory_format", [6, 12], dtype=_DOUBLE, splits="a b", compare=False),
    S("new_zeros", F(6, 12), [6, 12], splits="a b"),
    S("new_ones", F(18), [6, 12], dtype=DType("bool"), splits="a b"),
    S("new_ones", I(1, 1, 12, 1), [], dtype=DType("bool")),
    S("new_full", F(6, 12), [6, 18], 2.5, splits="a b"),
    *(S(f"nnscaler.random_{name}", [6, 12], _DOUBLE, splits="a b", compare=False) for name in ("uniform", "normal")),
    S("new_empty", F(6), [6, 12], splits="a b", compare=False),
    S("zeros_like", F(6, 12), splits="*0 *1"),
    S("ones_like", F(6, 12), splits="*0 *1"),
    S("full_like", I(6, 12), 3, splits="*0 *1"),
    S("empty_like", F(6, 12), splits="*0 *1", compare=False),
    S("scalar_tensor", 2.5, dtype=_DOUBLE),
    S("eye", 6),
    S("eye.m", 6, 12),
    S("linspace", 0, 1, 12),
    S("fill.Scalar", F(6, 12), 2.5, splits="*0 *1"),
    S("fill.Tensor", F(6, 12), F(), splits="a b"),
    S("zero", F(6, 12), splits="*0 *1"),
)

_POINTWISE_LOSSES: tuple[Sample, ...] = (
    *(S(n, F(6, 12), F(6, 12), splits="a b") for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    S("soft_margin_loss", F(6, 12), C(6, 12), splits="a b"),
    *(S("mse_loss", F(6, 12), F(6, 12), reduction, splits="a b") for reduction in (0, 1, 2)),
    *(S("smooth_l1_loss", F(6, 12), F(6, 12), reduction, 0.3, splits="a b") for reduction in (0, 1, 2)),
    S("smooth_l1_loss", F(6, 12), F(6, 12), beta=0.3, splits="a b"),
    S("huber_loss", F(6, 12), F(6, 12), 1, 0.3, splits="a b"),
    *(S("binary_cross_entropy", U(6, 12), U(6, 12), None, reduction, splits="a b") for reduction in (0, 1, 2)),
    S("binary_cross_entropy", U(6, 12), U(6, 12), C(12), splits="a b"),
    *(S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), None, C(12), r, splits="a b") for r in (0, 1, 2)),
    S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), splits="a b"),
    S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), C(6, 1), reduction=1, splits="a b"),
)

_CE = "cross_entropy_loss"

_LABEL_LOSSES: tuple[Sample, ...] = (
    S("nnscaler.ce_max", F(12, 18), splits="c n"),
    S("nnscaler.ce_sumexp", F(12, 18), F(12), splits="c n"),
    S("nnscaler.ce_pick", F(12, 18), I(12, high=18), -100, splits="c n"),
    S("nnscaler.ce_pick", F(12, 18), I(12, high=18), 4, splits="c n"),
    S("nnscaler.ce_tail", P(12), F(12), F(12), I(12, high=5), 3, splits="n"),
    S("nnscaler.ce_count", I(12, high=5), 3, splits="n"),
    S(_CE, F(12, 5), I(12, high=5)),
    S(_CE, F(12, 6), I(12, high=6), None, 0, 3, splits="n"),
    S(_CE, F(12, 6), I(12, high=6), C(6), 2, 3, 0.1, splits="n"),
    S(_CE, F(12, 6, 18), I(12, 18, high=6), None, 2, splits="n s0"),
    S(_CE, F(12, 6, 18), I(12, 18, high=6), C(6), 0, splits="n s0"),
    S(_CE, F(12, 6, 18), U(12, 6, 18), None, 2, splits="n s0"),
    S(_CE, F(12, 6), U(12, 6), None, 0, splits="n"),
    S(_CE, F(6), I(high=6), None, 2),
    S(_CE, F(6), I(high=6), None, 0),
    S("nll_loss_nd", F(12, 6), I(12, high=6)),
    S("nll_loss_nd", F(12, 6), I(12, high=6), C(6), 2, 3, splits="n"),
    S("nll_loss_nd", F(12, 6, 18), I(12, 18, high=6), None, 0, splits="n s0"),
)

SAMPLES: tuple[Sample, ...] = (*_EMBEDDING, *_INDEX, *_SORT, *_FACTORIES, *_POINTWISE_LOSSES, *_LABEL_LOSSES)
