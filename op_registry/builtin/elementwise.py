"""Operators that work element by element: every dim of the broadcast result may be split.

An operand that is expanded along a split dim lacks the identifier: it is replicated, its gradient a partial sum.
"""

from __future__ import annotations

from op_registry.builtin._dims import annotate, broadcast, linear_in, linear_in_all
from op_registry.call import Call
from op_registry.spec import LinearSets, OperatorSpec

_FIRST = linear_in({0})

_UNARY = """
    abs absolute acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad digamma elu erf erfc erfinv
    exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma
    log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn
    sigmoid round.decimals sign signbit silu sin sinc sinh softplus softshrink special_expit sqrt square tan tanh
    threshold trunc
""".split()
_UNARY_LINEAR = "alias clone contiguous detach lift_fresh_copy neg negative positive".split()

# Scalars in place of tensors bind no operand, so that one rule serves `.Tensor` and `.Scalar` overloads.
_BROADCAST = """
    atan2 bitwise_and.Scalar bitwise_and.Tensor bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Tensor clamp
    clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor copysign.Scalar copysign.Tensor eq.Scalar
    eq.Tensor floor_divide floor_divide.Scalar fmax fmin fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor greater.Tensor
    gt.Scalar gt.Tensor hypot le.Scalar le.Tensor less.Tensor logaddexp logical_and logical_or logical_xor lt.Scalar
    lt.Tensor max.other maximum min.other minimum ne.Scalar ne.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    remainder.Scalar remainder.Tensor where.Scalar where.ScalarOther where.ScalarSelf xlogy.Tensor __and__.Scalar
    __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Tensor add.Scalar sub.Scalar rsub.Scalar div.Tensor_mode
    masked_fill.Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor
    bitwise_right_shift.Tensor_Scalar divide.Tensor_mode lerp.Tensor polar
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


def _fill_linear(call: Call) -> LinearSets:
    """`masked_fill(x, mask, value)` is affine unless the value is 0."""
    return _FIRST(call) if call.get(2, "value") == 0 else ()


def _overload(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(_overload(name), "* -> *") for name in _UNARY),
    *(OperatorSpec(_overload(name), "* -> *", linear=_FIRST) for name in _UNARY_LINEAR),
    *(OperatorSpec(_overload(name), broadcasting) for name in _BROADCAST),
    *(
        OperatorSpec(f"aten.{name}.Tensor", broadcasting, linear=_sum_linear)
        for name in ("add", "sub", "rsub", "subtract")
    ),
    *(OperatorSpec(f"aten.{name}.Tensor", broadcasting, linear=_product_linear) for name in ("mul", "multiply")),
    *(OperatorSpec(f"aten.{name}.Tensor", broadcasting, linear=_FIRST) for name in ("div", "divide", "true_divide")),
    OperatorSpec("aten.mul.Scalar", broadcasting, linear=_FIRST),
    OperatorSpec("aten.div.Scalar", broadcasting, linear=_FIRST),
    OperatorSpec("aten.where.self", broadcasting, linear=linear_in({1, 2})),
    OperatorSpec("aten.masked_fill.Scalar", broadcasting, linear=_fill_linear),
    OperatorSpec("aten.addcmul.default", broadcasting, linear=linear_in({0, 1}, {0, 2})),
    OperatorSpec("aten.addcdiv.default", broadcasting, linear=linear_in({0, 1})),
    OperatorSpec("aten.lerp.Scalar", broadcasting, linear=linear_in({0, 1})),
    OperatorSpec("aten.broadcast_tensors.default", _broadcast_tensors, linear=linear_in_all),
    OperatorSpec("aten.view_as_complex.default", "* 2 -> *", linear=_FIRST),
    OperatorSpec("aten.view_as_real.default", "* -> * 2", linear=_FIRST),
    *(
        OperatorSpec(f"nnscaler.{name}", "* -> *", random=True)
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
)
