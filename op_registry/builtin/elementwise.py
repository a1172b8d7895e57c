"""Annotations of operators that work element by element, `torch.special` and casts included: every dim of the result
may be split. An operand that is expanded along a split dim lacks the identifier: it is replicated, its gradient a
partial sum."""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.builtin._name_and_broadcast_dims import (
    all_frozen,
    annotate,
    broadcast,
    letters,
    linear_in,
    linear_in_all,
    marked,
    tensor,
)
from op_registry.call import Call
from op_registry.spec import LinearSets, OperatorSpec

_FIRST = linear_in({0})

_UNARY = """
    abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil
    celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish
    hardtanh i0 isfinite isinf isin.Tensor_Scalar isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2
    log_sigmoid logical_not logit mish mvlgamma nan_to_num polygamma reciprocal relu relu6 round round.decimals
    rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold trunc
""".split()
_KEEP_RESULTS = """
    exp exp2 expm1 reciprocal relu rsqrt sgn sigmoid sqrt tan tanh
    special_erfcx special_exp2 special_expit special_expm1 special_i0e special_i1 special_i1e special_log_ndtr
    special_ndtri
""".split()
_UNARY_LINEAR = """
    alias clone contiguous deg2rad detach lift lift_fresh lift_fresh_copy neg negative positive rad2deg
""".split()
_COMPUTES = "deg2rad neg negative rad2deg".split()  # the other ones give the value that they are given

# Scalars in place of tensors bind no operand, so that one rule serves `.Tensor` and `.Scalar` overloads.
_BROADCAST = """
    arctan2 atan2 clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clip clip.Tensor copy
    copysign.Scalar copysign.Tensor float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor floor_divide
    floor_divide.Scalar fmax fmin fmod.Scalar fmod.Tensor gcd heaviside hypot igamma igammac isclose lcm logaddexp
    logaddexp2 logical_and logical_or logical_xor max.other maximum min.other minimum nextafter pow.Scalar
    polar pow.Tensor_Scalar pow.Tensor_Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor where.Scalar
    xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor add.Scalar sub.Scalar subtract.Scalar rsub.Scalar div.Scalar_mode
    div.Tensor_mode divide.Scalar_mode divide.Tensor_mode
""".split()
_SHIFTS = "add.Scalar sub.Scalar subtract.Scalar rsub.Scalar".split()  # by a number, which makes them affine
_HANDED_ON = _SHIFTS[:3]  # `rsub` turns the sign of the gradient
_COMPARISONS = "eq ge gt greater greater_equal le less less_equal lt ne not_equal".split()
_BITS = """
    bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor
    bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_or.Scalar bitwise_or.Scalar_Tensor
    bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
    bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor __and__.Scalar __and__.Tensor __lshift__.Scalar
    __lshift__.Tensor __or__.Scalar __or__.Tensor __rshift__.Scalar __rshift__.Tensor __xor__.Scalar __xor__.Tensor
""".split()


def broadcasting(call: Call) -> str:
    """All tensors of the call broadcast together: `a b, b -> a b`."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    return annotate(operands, [result])


def _broadcast_tensors(call: Call) -> str:
    """As many results as operands, all of one shape: `a b, b -> a b, a b`."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    return annotate(operands, [result] * len(operands))


def _sum_linear(call: Call) -> LinearSets:
    """`add(x, y)`: both partial. `add(x, 1e-6)` is affine: the constant would be added once per rank."""
    return linear_in({0, 1})(call) if len(call.tensors()) == 2 else ()


def _product_linear(call: Call) -> LinearSets:
    """`mul(x, y)`: either; `mul(x, 0.5)`: x."""
    return linear_in(*({t.index} for t in call.tensors()))(call)


def _where_linear(call: Call) -> LinearSets:
    """`where(condition, x, 0)` and `where(condition, 0, x)`; another number is added once per rank."""
    number = call.get(2, "other") if call.operator == "aten.where.ScalarOther" else call.get(1, "self")
    return linear_in({1})(call) if number == 0 else ()


def _prelu(call: Call) -> str:
    """`prelu(x, weight)`: one slope, or one for each channel (dim 1)."""
    x, weight = tensor(call, 0, "self"), tensor(call, 1, "weight")
    names = letters(x.ndim)
    each = weight.ndim == 1 and weight.shape[0] > 1
    return annotate([names, [names[min(1, x.ndim - 1)]] if each else ["1"] * weight.ndim], [names])


def _rrelu(call: Call) -> str:
    """`rrelu(x, lower, upper, training)` draws random slopes when training."""
    return all_frozen(call) if call.get(3, "training", False) else "* -> *"


def _isin(call: Call) -> str:
    """`isin(x, among)`: an entry that is in any part is in the whole; `invert` asks for one that is in none."""
    x, among = tensor(call, 0, "elements"), tensor(call, 1, "test_elements")
    names = letters(x.ndim)
    return annotate(
        [names, marked(letters(among.ndim, avoid=names), "^" if call.kwargs.get("invert") else "+max")], [names]
    )


def _fill_linear(call: Call) -> LinearSets:
    """`masked_fill(x, mask, value)` is affine unless the value is 0."""
    return _FIRST(call) if call.get(2, "value") == 0 else ()


def _overload(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


# Changes of dtype. None of them passes partial sums: rounding before the sum is not rounding after it.


def companion(shape: Sequence[int], target: Sequence[int], names: Sequence[str]) -> list[str]:
    """Dims of an operand whose values do not matter (it only gives a dtype).

    It shares a dim of the result where the sizes agree, so that it may stay sharded as the others are: counted from the
    last dim, or from the first where more agree, as of `x.new_zeros(x.shape[0])`.
    """

    def counted(offset: int) -> list[str]:
        agree = [0 <= offset + i < len(target) and size == target[offset + i] for i, size in enumerate(shape)]
        return [names[offset + i] if agrees else f"y{i}^" for i, agrees in enumerate(agree)]

    from_last, from_first = counted(len(target) - len(shape)), counted(0)
    return min(from_last, from_first, key=lambda found: sum(name.endswith("^") for name in found))


def _like_other(call: Call) -> str:
    """`type_as(x, other)`: other gives the dtype only."""
    x, other = tensor(call, 0, "self"), tensor(call, 1, "other")
    names = letters(x.ndim)
    return annotate([names, companion(other.shape, x.shape, names)], [names])


_NAMES = ("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default")

_CASTS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", "* -> *", moves="cast", keeps_nothing=True) for name in _NAMES),
    OperatorSpec("aten.type_as.default", _like_other, moves="cast", keeps_nothing=True),
    OperatorSpec("aten.to.other", _like_other, moves="cast", keeps_nothing=True),
)


# The functions of `torch.special`: element by element.

_SPECIAL_UNARY = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e
    i1 i1e log1p log_ndtr logit modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln
    ndtr ndtri polygamma psi round scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc spherical_bessel_j0
""".split()
_BINARY = "gammainc gammaincc".split()
_WITH_NUMBERS = "xlog1py xlogy zeta".split()
POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
""".split()
_OVERLOADS = (
    *((name, ("default",)) for name in _BINARY),
    *((name, ("default", "other_scalar", "self_scalar")) for name in _WITH_NUMBERS),
    *((name, ("default", "n_scalar", "x_scalar")) for name in POLYNOMIALS),
)

_SPECIAL: tuple[OperatorSpec, ...] = (
    *(
        OperatorSpec(f"aten.special_{name}.default", "* -> *", keeps_result=f"special_{name}" in _KEEP_RESULTS)
        for name in _SPECIAL_UNARY
    ),
    *(
        OperatorSpec(f"aten.special_{name}.{overload}", broadcasting)
        for name, overloads in _OVERLOADS
        for overload in overloads
    ),
)


SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(_overload(name), "* -> *", keeps_result=name in _KEEP_RESULTS) for name in _UNARY),
    *(
        OperatorSpec(
            _overload(name),
            "* -> *",
            linear=_FIRST,
            moves=None if name in _COMPUTES else "value",
            detached=name == "detach",
        )
        for name in _UNARY_LINEAR
    ),
    OperatorSpec("aten.frexp.Tensor", "* -> *, *"),
    *(
        OperatorSpec(_overload(name), broadcasting, keeps_nothing=name in _SHIFTS, hands_on=name in _HANDED_ON)
        for name in (*_BROADCAST, *_BITS)
    ),
    *(OperatorSpec(f"aten.{n}.{overload}", broadcasting) for n in _COMPARISONS for overload in ("Tensor", "Scalar")),
    *(
        OperatorSpec(
            f"aten.{name}.Tensor",
            broadcasting,
            linear=_sum_linear,
            keeps_nothing=True,
            hands_on=f"{name}.Scalar" in _HANDED_ON,
        )
        for name in ("add", "sub", "rsub", "subtract")
    ),
    *(OperatorSpec(f"aten.{name}.Tensor", broadcasting, linear=_product_linear) for name in ("mul", "multiply")),
    *(OperatorSpec(f"aten.{name}.Tensor", broadcasting, linear=_FIRST) for name in ("div", "divide", "true_divide")),
    *(
        OperatorSpec(f"aten.{name}.Scalar", broadcasting, linear=_FIRST)
        for name in ("mul", "multiply", "div", "divide", "true_divide")
    ),
    OperatorSpec("aten.ldexp.Tensor", broadcasting, linear=_FIRST),
    OperatorSpec("aten.prelu.default", _prelu),
    OperatorSpec("aten.rrelu.default", _rrelu, draws_if=(3,)),
    OperatorSpec("aten.isin.Tensor_Tensor", _isin),
    OperatorSpec("aten.where.self", broadcasting, linear=linear_in({1, 2})),
    *(OperatorSpec(f"aten.where.Scalar{side}", broadcasting, linear=_where_linear) for side in ("Other", "Self")),
    OperatorSpec("aten.masked_fill.Tensor", broadcasting, linear=linear_in({0, 2})),
    OperatorSpec("aten.masked_fill.Scalar", broadcasting, linear=_fill_linear),
    OperatorSpec("aten.addcmul.default", broadcasting, linear=linear_in({0, 1}, {0, 2})),
    OperatorSpec("aten.addcdiv.default", broadcasting, linear=linear_in({0, 1})),
    *(OperatorSpec(f"aten.lerp.{of}", broadcasting, linear=linear_in({0, 1})) for of in ("Scalar", "Tensor")),
    OperatorSpec("aten.broadcast_tensors.default", _broadcast_tensors, linear=linear_in_all),
    OperatorSpec("aten.view_as_complex.default", "* 2 -> *", linear=_FIRST),
    OperatorSpec("aten.view_as_real.default", "* -> * 2", linear=_FIRST),
    *(
        OperatorSpec(f"nnscaler.{name}", "* -> *", random=True)
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
    *_CASTS,
    *_SPECIAL,
)
