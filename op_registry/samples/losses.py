"""Samples: losses, with each reduction that a hook serves."""

from __future__ import annotations

from op_registry.samples.sample import C, F, I, L, P, S, Sample, Tensor, U

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
