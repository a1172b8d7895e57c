"""Sample calls of products, reductions, normalisations, batch norm's parts, attention and losses."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.samples.sample import B, C, F, I, L, P, S, Sample, Tensor, U

_PRODUCTS: tuple[Sample, ...] = (
    S("linear", F(6, 12, 18), F(24, 18), splits="*0 *1 k n"),
    S("linear", F(6, 12, 18), F(24, 18), F(24), splits="*0 *1 k n"),
    S("linear", F(6, 12, 18), F(24, 18), None, splits="*0 *1 k n"),
    S("linear", F(6, 24), F(18, 24), F(18), splits="*0 k n"),
    S("linear", F(18), F(24, 18), F(24), splits="k n"),
    S("linear", F(6, 18), F(18), splits="*0 k"),
    S("matmul", F(6, 12), F(12, 18), splits="k m n"),
    S("matmul", F(12), F(12), splits="k"),
    S("matmul", F(6, 12), F(12), splits="k m"),
    S("matmul", F(12), F(24, 12, 18), splits="a k n"),
    S("matmul", F(4, 6, 8, 12), F(4, 6, 12, 18), splits="a b k m n"),
    S("matmul", F(4, 8, 18), F(6, 1, 18, 12), splits="a b k m n"),
    S("matmul", F(6, 1, 12, 18), F(18, 24), splits="a k m n"),
    S("mm", F(6, 12), F(12, 18), splits="k m n"),
    S("mm", F(12, 18), F(18, 24), splits="k m n"),
    S("bmm", F(8, 6, 12), F(8, 12, 18), splits="b k m n"),
    S("bmm", F(12, 4, 18), F(12, 18, 24), splits="b k m n"),
    S("mv", F(6, 12), F(12), splits="k m"),
    S("dot", F(12), F(12), splits="k"),
    S("outer", F(6), F(12), splits="m n"),
    S("addmm", F(18), F(6, 12), F(12, 18), splits="k m n"),
    S("addmm", F(6, 1), F(6, 12), F(12, 18), beta=0.5, alpha=2, splits="k m n"),
    S("addmm", F(6, 18), F(6, 12), F(12, 18), beta=0, splits="k m n"),
    S("addmm", F(), F(6, 12), F(12, 18), splits="k m n"),
    S("addmm", F(24), F(12, 18), F(18, 24), alpha=-1, splits="k m n"),
    S("baddbmm", F(8, 6, 18), F(8, 6, 12), F(8, 12, 18), splits="b k m n"),
    S("baddbmm", F(1, 18), F(12, 6, 24), F(12, 24, 18), beta=0.5, alpha=2, splits="b k m n"),
    S("einsum", "bik,bkj->bij", [F(8, 6, 12), F(8, 12, 18)], splits="b i j k"),
    S("einsum", "ij,jk", [F(6, 12), F(12, 18)], splits="i j k"),
    S("einsum", "...ij, j d -> ...di", [F(6, 8, 4, 12), F(12, 18)], splits="e0 e1 d i j"),
    S("einsum", "...ij,...jk->...ik", [F(6, 4, 12), F(8, 1, 12, 18)], splits="e0 e1 i j k"),
    S("einsum", "bhqd,bkd->bhqk", [F(4, 6, 8, 12), F(4, 18, 12)], splits="b d h k q"),
    S("einsum", "ab,cb,db->acd", [F(6, 12), F(18, 12), F(24, 12)], splits="a b c d"),
    S("einsum", "ab->b", [F(6, 12)], splits="a b"),
    S("einsum", "i,j->ij", [F(6), F(12)], splits="i j"),
    S("einsum", "...a->a", [F(6, 12)], splits="e0 a"),
    S("einsum", "ab,ab->a", [F(6, 1), F(6, 12)], splits="a b"),
    S("einsum", "ii->i", [F(6, 6)]),
)

_SUMS: tuple[Sample, ...] = (
    S("sum", F(6, 12), splits="a b"),
    S("sum", F()),
    S("sum", B(6, 12), splits="a b"),
    S("sum", I(6, 12), dtype=DType("float64"), splits="a b"),
    S("sum.dim_IntList", F(6, 12, 18), [1], splits="a b c"),
    S("sum.dim_IntList", F(6, 12, 18), [-1, 0], True, splits="a b c"),
    S("sum.dim_IntList", F(6, 12), None, splits="a b"),
    S("sum.dim_IntList", F(6, 12), [], splits="a b"),
    S("mean", F(6, 12), splits="a b"),
    S("mean", F(6, 12), dtype=DType("float64"), splits="a b"),
    S("mean.dim", F(6, 12, 18), [-1], True, splits="a b c"),
    S("mean.dim", F(6, 12, 18), [1, 2], splits="a b c"),
    S("mean.dim", F(6, 12), None, True, splits="a b"),
    S("mean.dim", F(6, 12), [1], dtype=DType("float64"), splits="a b"),
    S("mean.dim", F(12, 6, 24), [-1, 0], True, dtype=DType("float64"), splits="a b c"),
    S("mean.dim", F(6, 12, 24), [-2], splits="a b c"),
    S("mean.dim", F(6, 24), dim=[], keepdim=True, splits="a b"),
    S("mean", F(24), splits="a"),
    S("count_nonzero", I(6, 12, high=3), splits="a b"),
    S("count_nonzero", I(6, 12, high=3), -1, splits="a b"),
    S("count_nonzero.dim_IntList", I(6, 12, high=3), [0], splits="a b"),
    S("cumsum", F(6, 12, 18), 1, splits="a c"),
    S("cumsum", B(6, 12), -1, splits="a"),
    S("diff", F(6, 12), splits="a"),
    S("diff", I(6, 12), 1, -1, I(6, 1), splits="a"),
    S("diff", F(6, 12), 2, 0, F(3, 12), F(2, 12), splits="b"),
    S("diff", F(12, 6), 0, -1, F(12, 1), splits="a"),
)

_FROZEN: tuple[Sample, ...] = (
    S("amax", F(6, 12, 18), [1], splits="a b c"),
    S("amax", F(6, 12, 18), [1, -1], True, splits="a b c"),
    *(S(n, F(6, 12, 18), [1], splits="a c") for n in ("amin", "logsumexp")),
    S("logsumexp", F(6, 12, 18), [1, -1], True, splits="a"),
    *(S(n, F(6, 12, 18), 1, splits="a c") for n in ("argmax", "argmin")),
    S("max", F(6, 12), splits="a b"),
    *(S(n, F(6, 12)) for n in ("argmax", "min", "prod", "median", "var", "std", "norm.Scalar")),
    *(S(f"{n}.dim", F(6, 12, 18), 1, True, splits="a c") for n in ("max", "min", "median")),
    S("any.dim", B(6, 12, 18), 1, splits="a b c"),
    S("any.dims", B(6, 12, 18), [1, 2], True, splits="a b c"),
    S("any", B(6, 12), splits="a b"),
    S("all.dim", B(6, 12, 18), 1, splits="a c"),
    S("all.dims", B(6, 12, 18), [1, 2], True, splits="a"),
    S("all", B(6, 12)),
    *(S(f"{n}.correction", F(6, 12, 18), [-1], correction=0, keepdim=True, splits="a b") for n in ("var", "std")),
    *(S(f"{n}.correction", F(6, 12, 18), [0, 2], splits="b") for n in ("var", "var_mean", "std_mean")),
    *(S(f"{n}.dim", F(6, 12, 18), [1], False, True, splits="a c") for n in ("var", "std", "var_mean", "std_mean")),
    *(S(n, F(6, 12), False) for n in ("var_mean", "std_mean")),
    S("prod.dim_int", F(6, 12), 1, splits="a"),
    S("linalg_vector_norm", F(6, 12, 18), 2, [-1], True, splits="a b"),
    S("linalg_vector_norm", F(6, 12)),
    S("linalg_norm", F(6, 12, 18), None, [1], True, splits="a c"),
    S("linalg_norm", F(6, 12)),
    S("linalg_norm.ord_str", F(6, 12, 18), "fro", [0, -1], True, splits="b"),
    S("linalg_norm.ord_str", F(6, 12), "nuc"),
    S("norm.ScalarOpt_dim", F(6, 12, 18), 2, [1], True, splits="a c"),
    S("softmax.int", F(6, 12, 18), -1, splits="a b"),
    S("softmax.int", F(6, 12, 18), 1, DType("float64"), splits="a c"),
    S("_softmax", F(6, 12), 1, False, splits="a"),
    S("log_softmax.int", F(6, 12, 18), 2, splits="a b"),
    S("cumprod", F(6, 12), 0, splits="b"),
)

_NORMS: tuple[Sample, ...] = (
    S("layer_norm", F(6, 12, 18), [18], F(18), F(18), 1e-5, False, splits="a b"),
    S("layer_norm", F(6, 12, 18), [12, 18], F(12, 18), splits="a"),
    S("layer_norm", F(6, 12, 18), [18], None, F(18), splits="a b"),
    S("layer_norm", F(6, 12), [12], splits="a"),
    S("rms_norm", F(6, 12, 18), [18], F(18), 1e-6, splits="a b"),
    S("rms_norm", F(6, 12), [12], splits="a"),
    S("_weight_norm", F(6, 12, 18), F(6, 1, 1), 0, splits="a"),
    S("_weight_norm", F(6, 12, 18), F(1, 1, 18), 2, splits="c"),
    S("group_norm", F(18, 24, 5), 6, F(24), F(24), splits="b g"),
    S("group_norm", F(18, 24, 5, 7), 12, F(24), splits="b g"),
    S("group_norm", F(18, 24), 12, splits="b g"),
    S("group_norm", F(12, 24, 5), 6, F(24), F(24), 0.3, False, splits="b g"),
    S("group_norm", F(12, 24, 5), 24, eps=0.3, splits="b g"),
    S("batch_norm", F(18, 6, 12), F(6), F(6), C(6), C(6), False, 0.1, 1e-5, False, splits="b c s0"),
    S("batch_norm", F(18, 6), None, None, C(6), C(6), False, 0.1, 1e-5, False, splits="b c"),
    S("batch_norm", F(18, 6, 5), F(6), F(6), None, None, True, 0.1, 1e-5, False, splits="c"),
)

_SDPA = "scaled_dot_product_attention"
_QKV = (F(2, 6, 12, 4), F(2, 6, 18, 4), F(2, 6, 18, 8))

_ATTENTION: tuple[Sample, ...] = (
    S(_SDPA, F(6, 12, 18, 4), F(6, 12, 24, 4), F(6, 12, 24, 30), splits="a b l v"),
    S(_SDPA, F(12, 24, 6, 4), F(12, 24, 6, 4), F(12, 24, 6, 4), None, 0.0, True, splits="a b q v"),
    S(_SDPA, *_QKV, splits="a b l v"),
    S(_SDPA, *_QKV, None, 0.0, True, splits="a b q v"),
    S(_SDPA, F(4, 6, 12, 3), F(4, 6, 12, 3), F(4, 6, 12, 24), is_causal=True, scale=0.7, splits="a b q v"),
    S(_SDPA, *_QKV, B(12, 18), splits="a b l v"),
    S(_SDPA, *_QKV, F(2, 1, 12, 18), splits="a b l v"),
    S(_SDPA, *_QKV, F(1, 6, 12, 18), scale=1.0, splits="a b l v"),
    S(_SDPA, *_QKV, F(2, 6, 12, 18), splits="a b l v"),
    S(_SDPA, *_QKV, F(6, 1, 18), splits="a b l v"),
    S(_SDPA, *_QKV, F(2, 1, 1, 18), splits="a b l v"),
    S(_SDPA, F(6, 18, 4), F(6, 24, 4), F(6, 24, 12), splits="a l v"),
    S(_SDPA, F(18, 4), F(24, 4), F(24, 30), splits="l v"),
    S(_SDPA, F(4, 6, 12, 3), F(1, 6, 18, 3), F(1, 6, 18, 8), splits="a b l v"),
    S(_SDPA, F(18, 24, 6, 4), F(18, 6, 12, 4), F(18, 6, 12, 30), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(4, 24, 6, 3), F(4, 6, 9, 3), F(4, 6, 9, 8), None, 0.0, True, enable_gqa=True, splits="a g h q v"),
    S(_SDPA, F(4, 24, 6, 3), F(4, 6, 12, 3), F(4, 6, 12, 8), F(1, 24, 6, 12), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(4, 24, 6, 3), F(4, 6, 12, 3), F(4, 6, 12, 8), F(4, 1, 6, 12), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(4, 6, 12, 3), F(4, 6, 18, 3), F(4, 6, 18, 8), enable_gqa=True, splits="a b l v"),
)


# Samples: the parts of batch norm.

_BATCH_NORM: tuple[Sample, ...] = (
    S("nnscaler.batch_mean", F(12, 6, 18), splits="b c s0"),
    S("nnscaler.batch_mean", F(24, 12), splits="b c"),
    S("nnscaler.batch_mean", F(6, 12, 4, 18), splits="b c s0 s1"),
    S("nnscaler.batch_variance", F(12, 6, 18), F(6), splits="b c s0"),
    S("nnscaler.batch_variance", F(24, 12), F(12), splits="b c"),
    S("nnscaler.batch_normalise", F(12, 6, 18), F(6), P(2, 6), F(6), F(6), 1e-5, splits="b c s0"),
    S("nnscaler.batch_normalise", F(24, 12), F(12), P(2, 12), None, None, 1e-5, splits="b c"),
    S("nnscaler.batch_normalise", F(6, 12), F(12), P(2, 12), F(12), None, 0.1, splits="b c"),
    S("nnscaler.running_statistic", C(12), C(12), 0.3, splits="c"),
)


PRODUCTS_NORMS_ATTENTION: tuple[Sample, ...] = (*_PRODUCTS, *_SUMS, *_FROZEN, *_NORMS, *_ATTENTION, *_BATCH_NORM)


# Samples: losses, with each reduction that a hook serves.

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

LOSSES: tuple[Sample, ...] = (
    *_POINTWISE_LOSSES,
    *_LABEL_LOSSES,
    *_POINTWISE,
    *_VECTORS,
    *_CLASSES,
    *_SPEECH,
)
