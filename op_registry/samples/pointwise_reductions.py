"""Sample calls of element-wise operators, casts, functions of `torch.special`, and reductions."""

from __future__ import annotations

from op_registry.builtin.elementwise import POLYNOMIALS
from op_registry.call import DType
from op_registry.samples.sample import B, C, F, I, P, S, Sample, Tensor, U

_DOUBLE = DType("float64")

_ON_FLOATS = """
    abs absolute alias asinh atan ceil celu clone contiguous cos cosh deg2rad detach elu erf erfc exp exp2 expm1
    floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lift_fresh_copy
    log_sigmoid logical_not mish nan_to_num neg negative positive relu relu6 round selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink special_expit square tan tanh trunc
""".split()
_ON_POSITIVES = "digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt".split()
_ON_UNIT = "acos asin atanh erfinv logit".split()

_UNARY: tuple[Sample, ...] = (
    *(S(name, F(6, 12), splits="*0 *1") for name in _ON_FLOATS),
    *(S(name, P(6, 12), splits="*0 *1") for name in _ON_POSITIVES),
    *(S(name, U(6, 12), splits="*0 *1") for name in _ON_UNIT),
    S("acosh", Tensor((6, 12), "above"), splits="*0 *1"),
    S("bitwise_not", B(6, 12), splits="*0 *1"),
    S("threshold", F(6, 12), 0.1, 20.0, splits="*0 *1"),
    S("gelu", F(6), approximate="tanh", splits="*0"),
    S("gelu", F()),
    S("round.decimals", F(6, 12), decimals=1, splits="*0 *1"),
    *(
        S(f"nnscaler.{name}", F(6, 12), 0.0, splits="*0 *1")
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
    *(
        S(f"nnscaler.{name}", F(6, 12, 24), 0.4, splits="*0 *1 *2")
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
)

_FLOAT_PAIRS = "copysign.Tensor fmax fmin hypot logaddexp maximum minimum atan2 max.other min.other".split()
_COMPARISONS = "eq ge gt le lt ne".split()
_LOGICAL = "logical_and logical_or logical_xor".split()
_BITS = "__and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor".split()

_BINARY: tuple[Sample, ...] = (
    *(S(name, F(6, 1, 12), F(18, 12), splits="a b c") for name in _FLOAT_PAIRS),
    *(S(f"{name}.Tensor", I(6, 12, high=3), I(12, high=3), splits="a b") for name in _COMPARISONS),
    *(S(f"{name}.Scalar", I(6, 12, high=3), 1, splits="a b") for name in _COMPARISONS),
    *(S(f"{name}.Tensor", F(6, 12), F(12), splits="a b") for name in ("greater", "less")),
    *(S(name, B(6, 1), B(6, 12), splits="a b") for name in _LOGICAL),
    *(S(name, B(), B(6, 1, 12), splits="a c") for name in _BITS),
    *(
        S(f"{name}.Scalar", I(6, 12, high=9), 5, splits="a b")
        for name in ("bitwise_and", "bitwise_or", "__and__", "__or__")
    ),
    *(S(f"bitwise_{side}_shift.Tensor_Scalar", I(6, 12, high=9), 2, splits="a b") for side in ("left", "right")),
    *(S(f"bitwise_{side}_shift.Tensor", I(6, 12, high=9), I(12, high=4), splits="a b") for side in ("left", "right")),
    S("copysign.Scalar", F(6, 12), -1.5, splits="a b"),
    *(S(f"{name}.Tensor", F(6, 12), P(12), splits="a b") for name in ("fmod", "remainder", "xlogy")),
    *(S(f"{name}.Scalar", I(6, 12, high=50), 7, splits="a b") for name in ("fmod", "remainder", "floor_divide")),
    S("floor_divide", I(6, 12, high=50), I(12, high=9, low=1), splits="a b"),
    S("floor_divide", I(6, 12, high=50), 7, splits="a b"),
    S("pow.Tensor_Scalar", F(6, 12), 2, splits="a b"),
    S("pow.Tensor_Scalar", P(6, 12), 0.5, splits="a b"),
    S("pow.Scalar", 2.5, F(6, 12), splits="a b"),
    S("pow.Tensor_Tensor", P(6, 12), F(6, 1), splits="a b"),
    S("broadcast_tensors", [F(6, 1), F(12)], splits="a b"),
    S("view_as_complex", F(6, 12, 2), splits="*0 *1"),
    S("view_as_real", Tensor((6, 12), "complex"), splits="*0 *1"),
    S("mul.Tensor", Tensor((6, 12), "complex"), Tensor((12,), "complex"), splits="a b"),
    S("polar", F(6, 12), F(6, 12), splits="a b"),
)

_ARITHMETIC: tuple[Sample, ...] = (
    *(
        S(f"{n}.Tensor", F(6, 18, 12), F(18, 1), splits="a b c")
        for n in ("add", "sub", "rsub", "subtract", "mul", "multiply")
    ),
    *(S(f"{n}.Tensor", F(6, 12), F(), splits="a b") for n in ("add", "sub", "mul")),
    *(S(f"{n}.Tensor", F(12), F(6, 12), splits="a b") for n in ("add", "mul")),
    *(S(f"{n}.Tensor", F(6, 12), 1e-1, splits="a b") for n in ("add", "sub", "mul", "div")),
    *(S(f"{n}.Scalar", F(6, 12), 1.5, splits="a b") for n in ("add", "sub", "rsub", "mul", "div")),
    *(S(f"{n}.Tensor", F(6, 12), P(12), splits="a b") for n in ("div", "divide", "true_divide")),
    S("add.Tensor", F(6, 12), F(6, 12), alpha=3, splits="a b"),
    S("add.Tensor", B(6, 12), B(12), splits="a b"),
    S("mul.Tensor", F(6, 12), B(12), splits="a b"),
    S("mul.Tensor", F(1, 6), F(12, 1), splits="a b"),
    *(
        S(f"{n}.Tensor_mode", F(6, 12), P(12), rounding_mode=mode, splits="a b")
        for n in ("div", "divide")
        for mode in ("floor", "trunc")
    ),
    S("add.Tensor", F(12, 1), F(24), splits="a b"),
    S("mul.Tensor", F(24, 12), F(24, 1), splits="a b"),
    S("addcmul", F(12), F(6, 12), F(6, 1), value=0.5, splits="a b"),
    S("addcdiv", F(6, 12), F(6, 12), P(12), value=0.5, splits="a b"),
    S("lerp.Scalar", F(6, 12), F(12), 0.3, splits="a b"),
    S("lerp.Tensor", F(6, 12), F(12), U(6, 1), splits="a b"),
)

_CHOICE: tuple[Sample, ...] = (
    S("where.self", B(6, 1, 12), F(18, 12), F(6, 18, 1), splits="a b c"),
    S("where.self", B(6, 12), I(6, 12), I(), splits="a b"),
    S("where.ScalarOther", B(6, 1, 12), F(1, 18, 12), -3.4e38, splits="a b c"),
    S("where.ScalarOther", B(6, 12), F(), -1.0, splits="a b"),
    S("where.ScalarSelf", B(6, 12), 1.0, F(12), splits="a b"),
    S("where.Scalar", B(6, 12), 1.0, 2.0, splits="a b"),
    S("masked_fill.Scalar", F(6, 18, 12), B(6, 1, 12), -100.0, splits="a b c"),
    S("masked_fill.Scalar", F(6, 12), B(6, 12), 0.0, splits="a b"),
    S("masked_fill.Tensor", F(6, 12), B(12), F(), splits="a b"),
    S("clamp", F(6, 12), -0.5, 0.5, splits="a b"),
    S("clamp", F(6, 12), None, 0.5, splits="a b"),
    S("clamp", F(6, 12), max=0.5, splits="a b"),
    S("clamp.Tensor", F(6, 12), F(12), P(6, 1), splits="a b"),
    S("clamp.Tensor", F(6, 12), None, F(12), splits="a b"),
    S("clamp_min", F(6, 12), 0.1, splits="a b"),
    S("clamp_max", F(6, 12), 0.1, splits="a b"),
    S("clamp_min.Tensor", F(6, 12), F(12), splits="a b"),
    S("clamp_max.Tensor", F(6, 12), F(12), splits="a b"),
)

_CASTS: tuple[Sample, ...] = (
    S("to.dtype", F(6, 12), _DOUBLE, splits="*0 *1"),
    S("to.dtype", F(6, 12), DType("int64"), splits="*0 *1"),
    S("to.dtype_layout", I(6, 12), dtype=_DOUBLE, splits="*0 *1"),
    S("to.device", F(6, 12), "cpu", _DOUBLE, splits="*0 *1"),
    S("_to_copy", F(6, 12), dtype=DType("float32"), splits="*0 *1"),
    S("type_as", I(6, 12), F(6, 12), splits="a b"),
    S("type_as", F(6, 12), F(12), splits="a b"),
    S("type_as", F(6, 12), F(18, 30, 6), splits="a b"),
    S("to.other", I(6, 12), F(6, 18), splits="a b"),
)


# Samples: functions of `torch.special`, aliases, and element-wise operators of one table row each.

_ABOVE = Tensor((12,), "above")

_ALIASES: tuple[Sample, ...] = (
    *(S(n, F(6, 12), splits="*0 *1") for n in "arcsinh arctan fix lift lift_fresh rad2deg rrelu".split()),
    *(S(n, F(6, 12), splits="*0 *1") for n in "isneginf isposinf isreal frexp.Tensor".split()),
    *(S(n, U(6, 12), splits="*0 *1") for n in "arccos arcsin arctanh".split()),
    *(S(n, Tensor((6, 12), "above"), splits="*0 *1") for n in ("arccosh", "i0")),
    S("mvlgamma", Tensor((6, 12), "above"), 2, splits="*0 *1"),
    S("polygamma", 2, P(6, 12), splits="*0 *1"),
    S("isin.Tensor_Scalar", I(6, 12), 3, splits="*0 *1"),
    S("isin.Tensor_Tensor", I(6, 12), I(2, 3), splits="a b c"),
    S("isin.Tensor_Tensor", I(6, 12), I(4), invert=True, splits="a b"),
    S("prelu", F(6, 12, 18), F(12), splits="a b c"),
    S("prelu", F(6, 12), F(1), splits="a b"),
    S("prelu", F(12), F(), splits="a"),
    S("clip", F(6, 12), -0.5, 0.5, splits="a b"),
    S("clip", F(6, 12), max=0.5, splits="a b"),
    S("clip.Tensor", F(6, 12), F(12), P(6, 1), splits="a b"),
    S("copy", C(6, 12), C(12), splits="a b"),
    *(S(f"{n}.Scalar", I(6, 12, high=3), 1, splits="a b") for n in ("greater", "less", "greater_equal", "less_equal")),
    *(S(f"{n}.Tensor", I(6, 12, high=3), I(12, high=3), splits="a b") for n in ("greater_equal", "less_equal")),
    S("not_equal.Scalar", I(6, 12, high=3), 1, splits="a b"),
    S("not_equal.Tensor", I(6, 12, high=3), I(12, high=3), splits="a b"),
    *(S(f"{n}.Scalar", F(6, 12), 1.5, splits="a b") for n in ("multiply", "divide", "true_divide", "subtract")),
    *(S(f"{n}.Scalar_mode", F(6, 12), 1.5, rounding_mode="floor", splits="a b") for n in ("div", "divide")),
    *(S(f"bitwise_{n}.Scalar_Tensor", 6, I(6, 12, high=4), splits="a b") for n in ("and", "or", "xor")),
    *(S(f"bitwise_{side}_shift.Scalar_Tensor", 6, I(6, 12, high=4), splits="a b") for side in ("left", "right")),
    *(S(f"{n}.Scalar", I(6, 12, high=9), 5, splits="a b") for n in ("bitwise_xor", "__xor__")),
    *(S(f"__{side}shift__.Scalar", I(6, 12, high=9), 2, splits="a b") for side in "lr"),
    *(S(f"__{side}shift__.Tensor", I(6, 12, high=9), I(12, high=4), splits="a b") for side in "lr"),
)

_PAIRS: tuple[Sample, ...] = (
    S("arctan2", F(6, 12), F(12), splits="a b"),
    S("float_power.Tensor_Tensor", P(6, 12), F(12), splits="a b"),
    S("float_power.Tensor_Scalar", P(6, 12), 1.5, splits="a b"),
    S("float_power.Scalar", 1.5, F(6, 12), splits="a b"),
    *(S(n, I(6, 12, high=30, low=1), I(12, high=12, low=1), splits="a b") for n in ("gcd", "lcm")),
    S("heaviside", C(6, 12), C(12), splits="a b"),
    *(S(n, C(6, 12), P(12), splits="a b") for n in ("igamma", "igammac")),
    S("isclose", I(6, 12, high=3), I(12, high=3), splits="a b"),
    S("logaddexp2", F(6, 12), F(12), splits="a b"),
    S("nextafter", C(6, 12), C(12), splits="a b"),
    S("ldexp.Tensor", F(6, 12), I(12, high=4), splits="a b"),
    S("remainder.Scalar_Tensor", 7, I(6, 12, high=9, low=1), splits="a b"),
    S("xlogy.Scalar_Other", F(6, 12), 1.5, splits="a b"),
    S("xlogy.Scalar_Self", 1.5, P(6, 12), splits="a b"),
    S("where.ScalarOther", B(6, 12), F(12), 0.0, splits="a b"),
    S("where.ScalarSelf", B(6, 12), 0.0, F(12), splits="a b"),
)

_ANY = "airy_ai bessel_j0 bessel_j1 modified_bessel_i0 modified_bessel_i1 spherical_bessel_j0".split()
_POSITIVE = """
    bessel_y0 bessel_y1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
""".split()
_SMOOTH = "erf erfc erfcx exp2 expit expm1 i0 i0e i1 i1e log_ndtr ndtr sinc round".split()
_SMOOTH_POSITIVE = "digamma entr gammaln log1p psi".split()

_SPECIAL: tuple[Sample, ...] = (
    *(S(f"special_{n}", C(12), splits="*0") for n in (*_ANY, *_POSITIVE)),
    *(S(f"special_{n}", F(12), splits="*0") for n in _SMOOTH),
    *(S(f"special_{n}", P(12), splits="*0") for n in _SMOOTH_POSITIVE),
    *(S(f"special_{n}", U(12), splits="*0") for n in ("erfinv", "logit", "ndtri")),
    S("special_multigammaln", _ABOVE, 2, splits="*0"),
    S("special_polygamma", 1, P(12), splits="*0"),
    *(S(f"special_{n}", C(6, 12), P(12), splits="a b") for n in ("gammainc", "gammaincc")),
    *(S(f"special_{n}", F(6, 12), P(12), splits="a b") for n in ("xlog1py", "xlogy")),
    *(S(f"special_{n}.other_scalar", F(12), 1.5, splits="a") for n in ("xlog1py", "xlogy")),
    *(S(f"special_{n}.self_scalar", 1.5, P(12), splits="a") for n in ("xlog1py", "xlogy")),
    S("special_zeta", I(6, 12, high=5, low=2), P(12), splits="a b"),
    S("special_zeta.other_scalar", I(12, high=5, low=2), 1.5, splits="a"),
    S("special_zeta.self_scalar", 2.5, P(12), splits="a"),
    *(S(f"special_{n}", C(6, 12), I(12, high=4), splits="a b") for n in POLYNOMIALS),
    *(S(f"special_{n}.n_scalar", C(12), 3, splits="a") for n in POLYNOMIALS),
    *(S(f"special_{n}.x_scalar", 0.5, I(12, high=4), splits="a") for n in POLYNOMIALS),
)

_SPECIAL_FUNCTIONS: tuple[Sample, ...] = (*_ALIASES, *_PAIRS, *_SPECIAL)


POINTWISE: tuple[Sample, ...] = (*_UNARY, *_BINARY, *_ARITHMETIC, *_CHOICE, *_CASTS, *_SPECIAL_FUNCTIONS)


# Samples: scans, reductions, norms.

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
