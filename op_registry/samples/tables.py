"""Samples: embeddings, indexing, sorting, factories, losses with each reduction that a hook serves."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.samples.sample import B, C, F, I, L, P, S, Sample, Tensor, U

_BAG = "nnscaler.embedding_bag"
_OFFSETS = Tensor((6,), "bags", 30)

_EMBEDDING: tuple[Sample, ...] = (
    S("embedding", F(24, 18), I(6, 12, high=24), splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), 5, splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), 0, splits="a b d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), padding_idx=23, splits="a b d v"),
    S("embedding", F(12, 24), I(18, high=12), 0, False, False, splits="a d v"),
    S("embedding", F(24, 18), I(high=24), splits="d v"),
    S("embedding", F(24, 18), I(6, 12, high=24), -1, True, False),
    *(S(_BAG, F(24, 18), I(6, 12, high=24), None, None, 0, False, p, splits="b d l v") for p in (None, 5, 23)),
    S(_BAG, F(24, 18), I(6, 12, high=24), None, F(6, 12), 0, False, None, splits="b d l v"),
    S(_BAG, F(24, 18), I(6, 12, high=24), None, F(6, 12), 0, False, 7, splits="b d l v"),
    *(S(_BAG, F(24, 18), I(6, 12, high=24), None, None, 1, False, p, splits="b d v") for p in (None, 5)),
    *(S(_BAG, F(24, 18), I(6, 12, high=24), None, None, 2, False, p, splits="b d") for p in (None, 5)),
    S(_BAG, F(24, 18), I(30, high=24), _OFFSETS, None, 0, False, None, splits="d v y"),
    S(_BAG, F(24, 18), I(30, high=24), Tensor((6,), "bags", 30, 1), None, 1, True, 4, splits="d v"),
    S(_BAG, F(24, 18), I(30, high=24), _OFFSETS, F(30), 0, False, 5, splits="d v y"),
    S(_BAG, F(24, 18), I(30, high=24), _OFFSETS, None, 2, False, None, splits="d y"),
    S(_BAG, F(24, 18), I(35, high=24), Tensor((7,), "bags", 35, 1), None, 1, True, 5, splits="d v y"),
    S("embedding_bag", F(24, 18), I(30, high=24), _OFFSETS),
    S("embedding_bag.padding_idx", F(24, 18), I(30, high=24), _OFFSETS, True, 0, False, None, False, 3),
    S("one_hot", I(6, 12, high=7), 7, splits="a b"),
    S("one_hot", I(6, 12, high=7)),
)

_INDEX: tuple[Sample, ...] = (
    S("index.Tensor", F(24, 6), [I(18, high=24)], splits="b c v"),
    S("index.Tensor", F(24, 6), [I(18, 12, high=24)], splits="b c d v"),
    S("index.Tensor", F(6, 24), [I(12, high=6, low=-6)], splits="b c v"),
    S("index.Tensor", F(6, 12, 18), [None, I(24, high=12)], splits="a c d v"),
    S("index.Tensor", F(6, 12), [I(18, 1, 1, high=6), I(1, 1, 24, high=12)], splits="c e"),
    S("index.Tensor", F(6, 12, 18), [I(24, high=6), None, I(24, high=18)], splits="b d"),
    S("index.Tensor", F(6, 12, 18), [None, I(24, high=12), I(24, high=18)], splits="a d"),
    S("index.Tensor", F(6, 12, 18, 24), [None, I(30, high=12), None, I(2, 30, high=24)], splits="a c e f"),
    S("index.Tensor", F(6, 12), [I(high=6)], splits="b v"),
    S("index.Tensor", F(6, 12, 18), [B(6, 12)], splits="c"),
    S("index.Tensor", F(6, 12, 18), [None, B(12)], splits="a c"),
    S("index.Tensor", F(6, 12), [B(6), I(1, high=12)]),
    S("index_put", F(6, 12), [Tensor((6,), "distinct", 6)], F(6, 12), splits="b v"),
    S("index_put", F(6, 12, 18), [None, Tensor((12,), "distinct", 12)], F(12, 1), splits="a c v"),
    S("index_put", F(6, 12), [I(18, high=6)], F(18, 12), True, splits="b c v"),
    S("index_put", F(6, 24), [I(12, high=6, low=-6)], F(12, 24), True, splits="b c v"),
    S("index_put", F(6, 12, 24), [None, I(18, high=12)], F(18, 1), True, splits="a c d v"),
    S("index_put", F(6, 12), [I(18, high=6), I(18, high=12)], F(), True, splits="c"),
    S("index_put", F(6, 12), [I(high=6), I(high=12)], F(), True),
    S("index_put", F(6, 12, 18), [B(6, 12)], F(), splits="a b c"),
    S("index_put", F(6, 12, 18), [None, B(12)], F(1), splits="a b c"),
    S("index_select", F(6, 12, 18), 1, I(24, high=12), splits="a bi c v"),
    S("index_select", F(6, 12), -1, I(24, high=12), splits="a bi v"),
    S("index_add", F(6, 12, 18), 1, I(24, high=12), F(6, 24, 18), splits="a bi c v"),
    S("index_add", F(6, 12), 0, I(24, high=6), F(24, 12), alpha=0.5, splits="ai b v"),
    S("index_copy", F(24, 12, 18), 1, Tensor((6,), "distinct", 12), F(24, 6, 18), splits="a c v"),
    S("index_fill.int_Scalar", F(12, 6, 18), 1, I(4, high=6), 2.5, splits="a c v"),
    S("index_fill.int_Tensor", F(12, 6), 1, I(4, high=6), F(), splits="a v"),
    S("index.Tensor", B(6, 12), [I(18, high=6)], splits="b c"),
    S("index.Tensor", F(6, 12, 24), [None, None, I(18, high=24, low=-24)], splits="a b d v"),
    S("index_put", F(12, 6), [I(18, high=12, low=-12)], F(6), True, splits="b c v"),
    S("index_put", I(12, 6), [Tensor((4,), "distinct", 12)], I(4, 6), False, splits="b v"),
    S("index_select", B(6, 12), 0, I(24, high=6), splits="ai b"),
    S("index_reduce", F(12, 6), 0, I(24, high=12), F(24, 6), "amax", splits="b v"),
    S("index_reduce", P(12, 6), 0, I(24, high=12), P(24, 6), "mean", include_self=False, splits="b v"),
    S("masked_scatter", F(12), B(12), F(80)),
    S("masked_scatter", F(12, 4, 3), B(12, 4, 3), F(50, 3), splits="v"),
    S("masked_select", F(6, 12), B(6, 12)),
    S("nonzero", B(6, 12)),
    S("take", F(6, 12), I(12, 6, high=72), splits="c d"),
    S("take_along_dim", F(6, 12, 18), I(6, 24, 18, high=12), 1, splits="a b c"),
    S("take_along_dim", F(6, 12, 18), I(1, 24, 1, high=12), 1, splits="a b c"),
    S("take_along_dim", F(1, 12), I(6, 24, high=12), -1, splits="a b"),
    S("take_along_dim", F(6, 12), I(24, high=72), splits="c"),
    S("masked_scatter", F(6, 12), B(6, 12), F(80), splits="v"),
    S("gather", F(6, 12, 18), 1, I(6, 24, 18, high=12), splits="a bi c v"),
    S("gather", F(6, 12), -1, I(6, 24, high=12), splits="a bi v"),
    S("gather", F(6, 12, 18), 1, I(2, 24, 18, high=12), splits="bi c v"),
    S("scatter.src", F(24, 12, 18), 1, Tensor((24, 8, 18), "distinct", 12), F(24, 8, 18), splits="a c v"),
    S("scatter.src", I(6, 12), 1, Tensor((6, 8), "distinct", 12), I(18, 9), splits="v"),
    S("scatter.value", F(24, 12, 18), 1, I(24, 3, 18, high=12), 2.5, splits="a c v"),
    S("scatter.value", F(6, 12), -1, I(4, 3, high=12), 0.0, splits="v"),
    S("scatter_add", F(6, 12, 18), 1, I(6, 24, 18, high=12), F(6, 24, 18), splits="a bi c v"),
    S("scatter_add", I(6, 12), 0, I(24, 12, high=6), I(30, 18), splits="v"),
    S("scatter_reduce.two", F(6, 12, 18), 1, I(6, 24, 18, high=12), F(6, 24, 18), "amax", splits="a c v"),
    S("scatter_reduce.two", F(6, 12), 0, I(24, 12, high=6), F(24, 12), "sum", include_self=False, splits="b v"),
    S("scatter.reduce", I(6, 12), 1, I(6, 24, high=12), I(6, 24), reduce="add", splits="a bi v"),
    S("scatter.reduce", I(6, 12), 1, I(6, 8, high=12), I(6, 8), reduce="multiply", splits="a v"),
    S("scatter.value_reduce", I(6, 12), 1, I(6, 8, high=12), 2, reduce="add", splits="a v"),
    S("scatter.value", F(6, 12), 1, index=I(6, 5, high=12), value=2.5, splits="a v"),
    S("scatter_reduce.two", F(6, 12), 0, I(24, 12, high=6), F(24, 12), "sum", splits="ai b v"),
    S("scatter_reduce.two", P(6, 12), 0, I(24, 12, high=6), P(24, 12), reduce="prod", splits="b v"),
    S("scatter_reduce.two", F(6, 12), 0, I(24, 12, high=6), F(24, 12), "mean", splits="b v"),
    S("bucketize.Tensor", F(6, 12), Tensor((5,), "sorted"), splits="*0 *1"),
)

_SORT: tuple[Sample, ...] = (
    S("sort", F(6, 12, 18), 1, splits="a c"),
    S("sort", F(6, 12), descending=True, splits="a"),
    S("sort.stable", I(6, 12), stable=True, dim=0, splits="b"),
    S("argsort", F(12, 6), splits="a"),
    S("argsort.stable", F(6, 12), stable=True, dim=0, splits="b"),
    S("topk", F(6, 12, 18), 4, splits="a b"),
    S("topk", F(6, 12), 3, 0, splits="b"),
    S("histc", F(6, 12), 5, -1, 1, splits="a b"),
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
    S("linspace.Scalar_Tensor", 0, C(), 12),
    S("linspace.Tensor_Scalar", C(), 3, 12),
    S("linspace.Tensor_Tensor", C(), C(), 12),
    S("fill.Scalar", F(6, 12), 2.5, splits="*0 *1"),
    S("fill.Tensor", F(6, 12), F(), splits="a b"),
    S("zero", F(6, 12), splits="*0 *1"),
)

_POINTWISE_LOSSES: tuple[Sample, ...] = (
    *(S(n, F(6, 12), F(6, 12), splits="a b") for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    S("soft_margin_loss", F(6, 12), C(6, 12), splits="a b"),
    *(S("soft_margin_loss", F(6, 12), C(6, 12), reduction, splits="a b") for reduction in (0, 2)),
    *(S("l1_loss", F(24, 12), F(24, 12), reduction, splits="a b") for reduction in (0, 1, 2)),
    *(S("mse_loss", F(6, 12), F(6, 12), reduction, splits="a b") for reduction in (0, 1, 2)),
    S("mse_loss", F(24), F(24), reduction=1, splits="a"),
    *(S("smooth_l1_loss", F(6, 12), F(6, 12), reduction, 0.3, splits="a b") for reduction in (0, 1, 2)),
    S("smooth_l1_loss", F(6, 12), F(6, 12), beta=0.3, splits="a b"),
    *(S("huber_loss", F(6, 12), F(6, 12), reduction, 0.3, splits="a b") for reduction in (0, 1, 2)),
    S("huber_loss", F(6, 12), F(6, 12), delta=0.3, splits="a b"),
    *(S("binary_cross_entropy", U(6, 12), U(6, 12), None, reduction, splits="a b") for reduction in (0, 1, 2)),
    *(S("binary_cross_entropy", U(6, 12), U(6, 12), C(12), r, splits="a b") for r in (0, 1, 2)),
    S("binary_cross_entropy", U(6, 12), U(6, 12), weight=C(6, 1), splits="a b"),
    *(S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), None, C(12), r, splits="a b") for r in (0, 1, 2)),
    S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), splits="a b"),
    S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), C(6, 1), reduction=1, splits="a b"),
    *(S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), C(6, 1), C(12), r, splits="a b") for r in (1, 2)),
    S("binary_cross_entropy_with_logits", F(6, 12), U(6, 12), pos_weight=C(12), splits="a b"),
)

_CE = "cross_entropy_loss"

_LABEL_LOSSES: tuple[Sample, ...] = (
    S("nnscaler.ce_max", F(12, 18), splits="c n"),
    S("nnscaler.ce_max", F(6, 24), splits="c n"),
    S("nnscaler.ce_sumexp", F(12, 18), F(12), splits="c n"),
    S("nnscaler.ce_sumexp", F(6, 24), F(6), splits="c n"),
    S("nnscaler.ce_pick", F(12, 18), I(12, high=18), -100, splits="c n"),
    S("nnscaler.ce_pick", F(18, 24), L(18, high=24), -100, splits="c n"),
    S("nnscaler.ce_pick", F(12, 18), L(12, high=18, ignore=17), 17, splits="c n"),
    S("nnscaler.ce_pick", F(12, 18), I(12, high=18), 4, splits="c n"),
    S("nnscaler.ce_tail", P(12), F(12), F(12), I(12, high=5), 3, splits="n"),
    S("nnscaler.ce_tail", P(18), F(18), F(18), L(18, high=5), -100, splits="n"),
    S("nnscaler.ce_count", I(12, high=5), 3, splits="n"),
    S("nnscaler.ce_count", L(18, high=5), -100, splits="n"),
    S("nnscaler.ce_weight", I(12, high=5), F(5), 3, splits="n"),
    S("nnscaler.ce_weight", L(18, high=5), F(5), -100, splits="n"),
    S(_CE, F(12, 5), I(12, high=5)),
    S(_CE, F(12, 6), I(12, high=6), None, 0, 3, splits="n"),
    S(_CE, F(12, 6), I(12, high=6), C(6), 2, 3, 0.1, splits="n"),
    S(_CE, F(12, 6), L(12, high=6), None, 2, splits="n"),
    S(_CE, F(12, 6, 24), L(12, 24, high=6), None, 0, -100, 0.2, splits="n s0"),
    S(_CE, F(12, 6, 18), I(12, 18, high=6), None, 2, splits="n s0"),
    S(_CE, F(12, 6, 18), I(12, 18, high=6), C(6), 0, splits="n s0"),
    S(_CE, F(12, 6, 18), U(12, 6, 18), None, 2, splits="n s0"),
    S(_CE, F(12, 6), U(12, 6), None, 0, splits="n"),
    S(_CE, F(6), I(high=6), None, 2),
    S(_CE, F(6), I(high=6), None, 0),
    S("nll_loss_nd", F(12, 6), I(12, high=6)),
    S("nll_loss_nd", F(12, 6), I(12, high=6), C(6), 2, 3, splits="n"),
    S("nll_loss_nd", F(12, 6, 18), I(12, 18, high=6), None, 0, splits="n s0"),
    S("nll_loss_nd", F(12, 6, 24), L(12, 24, high=6), C(6), 2, splits="n s0"),
)


# Samples: losses beside those of `tables`, with each reduction that a hook serves.

_SIGNS, _SIGNS_2 = Tensor((24,), "signs"), Tensor((6, 12), "signs")

_POINTWISE: tuple[Sample, ...] = (
    *(S("kl_div", F(6, 12), U(12), how, splits="a b") for how in (0, 1, 2)),
    S("kl_div", F(6, 24), F(6, 24), log_target=True, splits="a b"),
    S("kl_div", F(6, 12), U(6, 12), reduction=1, log_target=False, splits="a b"),
    *(S("poisson_nll_loss", F(6, 12), P(6, 12), True, False, 1e-8, how, splits="a b") for how in (0, 1, 2)),
    S("poisson_nll_loss", P(6, 12), P(6, 12), False, True, 0.3, 1, splits="a b"),
    *(S("hinge_embedding_loss", F(6, 12), _SIGNS_2, 0.7, how, splits="a b") for how in (0, 1, 2)),
    S("hinge_embedding_loss", F(6, 12), _SIGNS_2, splits="a b"),
    *(S("margin_ranking_loss", F(24), F(24), _SIGNS, 0.3, how, splits="a") for how in (0, 1, 2)),
    S("margin_ranking_loss", F(6, 1), F(12), _SIGNS_2, reduction=1, splits="a b"),
)

_VECTORS: tuple[Sample, ...] = (
    *(S("cosine_embedding_loss", F(24, 5), F(24, 5), _SIGNS, 0.2, how, splits="a") for how in (0, 1, 2)),
    S("cosine_embedding_loss", F(24, 5), F(24, 5), _SIGNS, splits="a"),
    *(
        S("triplet_margin_loss", F(12, 5), F(12, 5), F(12, 5), 1.0, 2.0, 1e-6, True, how, splits="a")
        for how in (0, 1, 2)
    ),
    S("triplet_margin_loss", F(6, 12, 5), F(1, 12, 5), F(6, 1, 5), margin=0.4, p=1.0, splits="a b"),
)

_CLASSES: tuple[Sample, ...] = (
    *(S("multi_margin_loss", F(12, 5), I(12, high=5), 1, 0.7, C(5), how, splits="n") for how in (0, 1, 2)),
    S("multi_margin_loss", F(12, 5), I(12, high=5), splits="n"),
    *(S("multilabel_margin_loss", F(12, 4), I(12, 4, high=4), how, splits="n") for how in (0, 1, 2)),
    *(S("cross_entropy_loss", F(12, 5), U(12, 5), None, how, splits="n") for how in (0, 1, 2)),
    S("cross_entropy_loss", F(12, 5, 6), U(12, 5, 6), C(5), 1, -100, 0.1, splits="n s0"),
    S("nll_loss", F(12, 5), L(12, high=5), None, 2, splits="n"),
    S("nll_loss", F(12, 5), L(12, high=5), C(5), 0, splits="n"),
    S("nll_loss", F(12, 5), L(12, high=5)),
    S("nll_loss2d", F(12, 5, 6, 4), L(12, 6, 4, high=5), None, 2, splits="n s0 s1"),
    S("nll_loss2d", F(12, 5, 6, 4), L(12, 6, 4, high=5)),
    S("nll_loss_forward", F(12, 5), L(12, high=5), C(5), 2, -100, splits="n"),
    S("nll_loss_forward", F(12, 5), L(12, high=5), None, 1, -100),
    S("nll_loss2d_forward", F(12, 5, 6, 4), L(12, 6, 4, high=5), None, 2, -100, splits="n s0 s1"),
)

_SPEECH: tuple[Sample, ...] = (
    *(
        S(
            "ctc_loss.Tensor",
            F(8, 12, 5),
            I(12, 3, high=5, low=1),
            I(12, high=9, low=7),
            I(12, high=4, low=1),
            0,
            how,
            zero,
            splits="n",
        )
        for how, zero in ((0, False), (1, False), (1, True), (2, False))
    ),
    S(
        "ctc_loss.Tensor",
        F(8, 12, 5),
        I(12, 3, high=4, low=0),
        I(12, high=9, low=7),
        I(12, high=4, low=1),
        4,
        splits="n",
    ),
    S("ctc_loss.IntList", F(8, 3, 5), I(3, 3, high=5, low=1), [8, 7, 8], [3, 2, 1]),
)

_LOSSES: tuple[Sample, ...] = (*_POINTWISE, *_VECTORS, *_CLASSES, *_SPEECH)


SAMPLES: tuple[Sample, ...] = (
    *_EMBEDDING,
    *_INDEX,
    *_SORT,
    *_FACTORIES,
    *_POINTWISE_LOSSES,
    *_LABEL_LOSSES,
    *_LOSSES,
)
