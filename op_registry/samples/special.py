"""Samples: functions of `torch.special`, aliases, and element-wise operators of one table row each."""

from __future__ import annotations

from op_registry.samples.sample import B, C, F, I, P, S, Sample, Tensor, U

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
_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
""".split()

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
    *(S(f"special_{n}", C(6, 12), I(12, high=4), splits="a b") for n in _POLYNOMIALS),
    *(S(f"special_{n}.n_scalar", C(12), 3, splits="a") for n in _POLYNOMIALS),
    *(S(f"special_{n}.x_scalar", 0.5, I(12, high=4), splits="a") for n in _POLYNOMIALS),
)

SAMPLES: tuple[Sample, ...] = (*_ALIASES, *_PAIRS, *_SPECIAL)
