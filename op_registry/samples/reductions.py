"""Samples: scans, reductions, norms."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.samples.sample import C, F, I, S, Sample, Tensor

_ORDER = Tensor((6,), "offsets", 5)  # indices into six entries

_SCANS: tuple[Sample, ...] = (
    *(S(f"special_{n}", F(6, 12), -1, splits="a") for n in ("softmax", "log_softmax")),
    S("_log_softmax", F(6, 12), 1, False, splits="a"),
    S("_safe_softmax", F(6, 12), -1, splits="a"),
    *(S(n, F(6, 12, 18), 1, splits="a c") for n in ("logcumsumexp", "cummax", "cummin")),
    *(S(f"{n}.dx", F(6, 12), dx=0.5, splits="a") for n in ("trapezoid", "trapz", "cumulative_trapezoid")),
    *(S(f"{n}.x", F(6, 12), F(12), splits="a") for n in ("trapezoid", "trapz", "cumulative_trapezoid")),
    S("trapezoid.x", F(6, 12), F(6, 12), dim=0, splits="b"),
    S("msort", F(6, 12), splits="b"),
    S("kthvalue", F(6, 12, 18), 3, 1, True, splits="a c"),
    S("kthvalue", F(6, 12), 2, splits="a"),
    S("mode", I(6, 12), splits="a"),
    S("nanmedian", F(6, 12)),
    S("nanmedian.dim", F(6, 12, 18), 1, True, splits="a c"),
    S("quantile", F(6, 12), Tensor((4,), "unit"), 1, splits="a q"),
    S("quantile", F(6, 12), Tensor((), "unit"), splits=""),
    S("quantile.scalar", F(6, 12), 0.3, 1, True, splits="a"),
    S("nanquantile", F(6, 12), Tensor((6,), "unit"), 0, True, splits="b q"),
    S("nanquantile.scalar", F(6, 12), 0.3, splits=""),
    S("searchsorted.Tensor", Tensor((24,), "sorted"), F(6, 12), splits="a b s"),
    S("searchsorted.Tensor", Tensor((6, 18), "sorted"), F(6, 12), right=True, splits="a s x"),
    S("searchsorted.Tensor", Tensor((6,), "sorted"), F(12), sorter=_ORDER, splits="a"),
    S("searchsorted.Scalar", Tensor((12,), "sorted"), 0.3, splits="s"),
    S("bucketize.Tensor", F(6, 12), Tensor((18,), "sorted"), right=True, splits="*0 *1 n"),
)

_REDUCTIONS: tuple[Sample, ...] = (
    S("nansum", F(6, 12, 18), [1], True, splits="a b c"),
    S("nansum", F(6, 12), splits="a b"),
    S("nanmean", F(6, 12, 18), [1], splits="a c"),
    S("sum_to_size", F(6, 12, 18), [12, 1], splits="a b c"),
    S("sum_to_size", F(6, 12), [6, 12], splits="a b"),
    S("aminmax", F(6, 12), dim=1, keepdim=True, splits="a"),
    S("aminmax", F(6, 12)),
    S("special_logsumexp", F(6, 12, 18), [1], splits="a c"),
    S("linalg__powsum", C(6, 12, 18), 2, [1], True, splits="a b c"),
    S("linalg__powsum", C(6, 12), 3, splits="a b"),
    S("linalg_vector_norm", F(6, 12, 18), 1, [-1], True, splits="a b c"),
    S("linalg_vector_norm", F(6, 12, 18), float("inf"), [1], splits="a b c"),
    S("linalg_vector_norm", F(6, 12), 0, splits="a b"),
    S("linalg_vector_norm", F(6, 12), -1.0),
    S("norm.Scalar", F(6, 12), 1, splits="a b"),
    S("norm.ScalarOpt_dtype", F(6, 12), 1, dtype=DType("float64"), splits="a b"),
    S("norm.ScalarOpt_dtype", F(6, 12), 2, dtype=DType("float64")),
    S("norm.ScalarOpt_dim_dtype", F(6, 12), 2, [1], True, dtype=DType("float64"), splits="a"),
    S("norm.ScalarOpt_dim", F(6, 12, 18), 1, [1], splits="a b c"),
    S("frobenius_norm.dim", F(6, 12, 18), [1], splits="a c"),
    S("nuclear_norm", F(4, 3)),
    S("nuclear_norm.dim", F(12, 4, 3), [1, 2], splits="a"),
    S("linalg_matrix_norm", F(12, 4, 3), 2, splits="a"),
    S("linalg_matrix_norm.str_ord", F(4, 12, 3), "fro", [0, 2], True, splits="b"),
    S("histc", F(6, 12), 5, -1.0, 1.0, splits="a b"),
    S("histc", F(24), 5),
    S("any", Tensor((12, 24), "rare"), splits="a b"),
    S("any.dims", Tensor((6, 12, 24), "rare"), None, splits="a b c"),
    S("amax", F(12, 24), splits="a b"),
    S("max", I(24, high=50), splits="a"),
)

_NORMS: tuple[Sample, ...] = (
    S("_weight_norm_interface", F(6, 12, 18), F(6, 1, 1), splits="a"),
    S("norm_except_dim", F(6, 12, 18), 2, 0, splits="a"),
    S("norm_except_dim", F(6, 12), 2, -1),
    S("renorm", F(6, 12, 18), 2, 1, 1.5, splits="b"),
    S("instance_norm", F(6, 12, 5), F(12), F(12), None, None, True, 0.1, 1e-5, False, splits="b c"),
    S("instance_norm", F(6, 12, 18), F(12), F(12), C(12), C(12), False, 0.1, 1e-5, False, splits="b c s0"),
    S("native_layer_norm", F(6, 12, 18), [18], F(18), F(18), 1e-5, splits="a b"),
    S("native_layer_norm", F(6, 12), [12], None, None, 0.3, splits="a"),
    S("_fused_rms_norm", F(6, 12, 18), [18], F(18), 1e-5, splits="a b"),
    S("native_group_norm", F(12, 6, 5), F(6), F(6), 12, 6, 5, 3, 1e-5, splits="b"),
    S("native_batch_norm", F(18, 6, 5), F(6), F(6), None, None, True, 0.1, 1e-5, splits="c"),
    S("native_batch_norm", F(18, 6, 12), F(6), F(6), C(6), C(6), False, 0.1, 1e-5, splits="b c s0"),
    S("_native_batch_norm_legit_no_training", F(18, 6), F(6), F(6), C(6), C(6), 0.1, 1e-5, splits="b c"),
)

REDUCTIONS: tuple[Sample, ...] = (*_SCANS, *_REDUCTIONS, *_NORMS)
