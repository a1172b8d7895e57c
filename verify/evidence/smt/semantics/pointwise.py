"""Semantics of operators that work entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import pi, sqrt
from types import MappingProxyType
from typing import Any

from verify.evidence.smt.element_arithmetic import FUNCTIONS, Element, Numbers, Unsupported, kind_of_dtype
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, each, filled

_HALF = Fraction(1, 2)
_ROOT_HALF = Fraction(sqrt(0.5))
_ROOT_2_PI = Fraction(sqrt(2 / pi))
_CUBIC = Fraction(0.044715)


def sigmoid(al: Numbers, x: Element) -> Element:
    return al.reciprocal(al.add(1, al.function("exp", al.negative(x))))


def _rsqrt(al: Numbers, x: Element) -> Element:
    return al.reciprocal(al.function("sqrt", x))


def _relu(al: Numbers, x: Element) -> Element:
    return al.maximum(x, 0)


def clamped(al: Numbers, x: Element, low: Element | None, high: Element | None) -> Element:
    x = x if low is None else al.maximum(x, low)
    return x if high is None else al.minimum(x, high)


def _applied(name: str) -> Callable[[Numbers, Element], Element]:
    return lambda al, x: al.function(name, x)


_UNARY: Mapping[str, Callable[[Numbers, Element], Element]] = MappingProxyType(
    {
        "neg": lambda al, x: al.negative(x),
        "abs": lambda al, x: al.absolute(x),
        "sign": lambda al, x: al.sign(x),
        "relu": _relu,
        "reciprocal": lambda al, x: al.reciprocal(x),
        "rsqrt": _rsqrt,
        "sigmoid": sigmoid,
        "expm1": lambda al, x: al.add(al.function("exp", x), -1),
        "log1p": lambda al, x: al.function("log", al.add(1, x)),
        "erfc": lambda al, x: al.subtract(1, al.function("erf", x)),
        "floor": lambda al, x: al.floor(x),
        "ceil": lambda al, x: al.negative(al.floor(al.negative(x))),
        "logical_not": lambda al, x: al.opposite(al.cast(x, "bool")),
        "isnan": lambda al, x: al.opposite(al.equal(x, x)),  # real numbers are no NaN
        **{name: _applied(name) for name in FUNCTIONS},
    }
)


def _logic(al: Numbers, a: Element, b: Element) -> tuple[Element, Element]:
    return al.cast(a, "bool"), al.cast(b, "bool")


def _both(al: Numbers, a: Element, b: Element) -> Element:
    return al.both(*_logic(al, a, b))


def _either(al: Numbers, a: Element, b: Element) -> Element:
    return al.either(*_logic(al, a, b))


def _one_of(al: Numbers, a: Element, b: Element) -> Element:
    a, b = _logic(al, a, b)
    return al.where(a, al.opposite(b), b)


_BINARY: Mapping[str, Callable[[Numbers, Element, Element], Element]] = MappingProxyType(
    {
        "mul": lambda al, a, b: al.multiply(a, b),
        "div": lambda al, a, b: al.divide(a, b),
        "eq": lambda al, a, b: al.equal(a, b),
        "ne": lambda al, a, b: al.opposite(al.equal(a, b)),
        "lt": lambda al, a, b: al.less(a, b),
        "le": lambda al, a, b: al.less_equal(a, b),
        "gt": lambda al, a, b: al.less(b, a),
        "ge": lambda al, a, b: al.less_equal(b, a),
    }
)

_BINARY_DEFAULT: Mapping[str, Callable[[Numbers, Element, Element], Element]] = MappingProxyType(
    {
        "maximum": lambda al, a, b: al.maximum(a, b),
        "minimum": lambda al, a, b: al.minimum(a, b),
        "logical_and": _both,
        "logical_or": _either,
        "logical_xor": _one_of,
    }
)


def _unary(function: Callable[[Numbers, Element], Element]) -> Rule:
    return lambda al, given: each(lambda x: function(al, x), given["self"])


def _binary(function: Callable[[Numbers, Element, Element], Element]) -> Rule:
    return lambda al, given: each(lambda a, b: function(al, a, b), given["self"], given["other"])


def _on_bools(function: Callable[[Numbers, Element, Element], Element]) -> Rule:
    def rule(al: Numbers, given: Given) -> Array:
        if given.outputs and given.outputs[0] is not None and kind_of_dtype(given.outputs[0].dtype) != "bool":
            raise Unsupported("bits of integers")
        return each(lambda a, b: function(al, a, b), given["self"], given["other"])

    return rule


def _bitwise_not(al: Numbers, given: Given) -> Array:
    if given.outputs and given.outputs[0] is not None and kind_of_dtype(given.outputs[0].dtype) != "bool":
        return each(lambda x: al.subtract(-1, x), given["self"])
    return each(al.opposite, given["self"])


def _add(al: Numbers, given: Given) -> Array:
    alpha = given.get("alpha", 1)
    return each(lambda a, b: al.add(a, al.multiply(alpha, b)), given["self"], given["other"])


def _subtract(al: Numbers, given: Given) -> Array:
    alpha = given.get("alpha", 1)
    return each(lambda a, b: al.subtract(a, al.multiply(alpha, b)), given["self"], given["other"])


def _divide_rounded(al: Numbers, given: Given) -> Array:
    mode = given["rounding_mode"]
    if mode is None:
        return each(al.divide, given["self"], given["other"])
    if mode != "floor":
        raise Unsupported(f"rounding mode {mode}")
    return _floor_divide(al, given)


def _floor_divide(al: Numbers, given: Given) -> Array:
    def quotient(a: Element, b: Element) -> Element:
        if given.outputs and given.outputs[0] is not None and kind_of_dtype(given.outputs[0].dtype) == "int":
            return _whole_quotient(al, a, b)
        return al.floor(al.divide(a, b))

    return each(quotient, given["self"], given["other"])


def _whole_quotient(al: Numbers, a: Element, b: Element) -> Element:
    if al.symbolic(b) or b <= 0:
        raise Unsupported("an integer division by what is no positive number")
    return al.floor_divide(a, b)


def _remainder(al: Numbers, given: Given) -> Array:
    def rest(a: Element, b: Element) -> Element:
        return al.subtract(a, al.multiply(b, _whole_quotient(al, a, b)))

    if given.outputs and given.outputs[0] is not None and kind_of_dtype(given.outputs[0].dtype) != "int":
        raise Unsupported("the remainder of floating numbers")
    return each(rest, given["self"], given["other"])


def _where(al: Numbers, given: Given) -> Array:
    return each(al.where, given["condition"], given["self"], given["other"])


def _clamp(al: Numbers, given: Given) -> Array:
    low, high = (filled((), None) if given[key] is None else given[key] for key in ("min", "max"))
    return each(lambda x, a, b: clamped(al, x, a, b), given["self"], low, high)


def _power(al: Numbers, given: Given) -> Array:
    return each(al.raised, given["self"], given["exponent"])


def _normal_cdf(al: Numbers, x: Element) -> Element:
    return al.multiply(_HALF, al.add(1, al.function("erf", al.multiply(_ROOT_HALF, x))))


def _gelu(al: Numbers, given: Given) -> Array:
    def exact(x: Element) -> Element:
        return al.multiply(x, _normal_cdf(al, x))

    def by_tanh(x: Element) -> Element:
        cube = al.multiply(_CUBIC, al.raised(x, 3))
        inner = al.function("tanh", al.multiply(_ROOT_2_PI, al.add(x, cube)))
        return al.multiply(al.multiply(_HALF, x), al.add(1, inner))

    return each(exact if given["approximate"] == "none" else by_tanh, given["self"])


def _leaky_relu(al: Numbers, given: Given) -> Array:
    slope = given["negative_slope"]
    return each(lambda x: al.where(al.less(0, x), x, al.multiply(slope, x)), given["self"])


# Gradients that have an operator of their own.


def _overloads(name: str, rule: Rule, overloads: str) -> dict[str, Rule]:
    return {f"aten.{name}.{overload}": rule for overload in overloads.split()}


def _same(_al: Numbers, given: Given) -> Any:
    return given["self"].copy()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}.default": _unary(function) for name, function in _UNARY.items()},
        **{f"aten.{name}.Tensor": _binary(function) for name, function in _BINARY.items()},
        **{f"aten.{name}.Scalar": _binary(function) for name, function in _BINARY.items()},
        **{f"aten.{name}.default": _binary(function) for name, function in _BINARY_DEFAULT.items()},
        **_overloads("bitwise_and", _on_bools(_both), "Tensor Scalar"),
        **_overloads("bitwise_or", _on_bools(_either), "Tensor Scalar"),
        **_overloads("bitwise_xor", _on_bools(_one_of), "Tensor Scalar"),
        **_overloads("bitwise_not", _bitwise_not, "default"),
        **_overloads("add", _add, "Tensor Scalar"),
        **_overloads("sub", _subtract, "Tensor Scalar"),
        **_overloads("div", _divide_rounded, "Tensor_mode Scalar_mode"),
        **_overloads("remainder", _remainder, "Tensor Scalar"),
        **_overloads("where", _where, "self"),
        **_overloads("clamp", _clamp, "default Tensor"),
        **_overloads("hardtanh", lambda al, g: _clamp(al, _bounds(g)), "default"),
        **_overloads("pow", _power, "Tensor_Scalar Tensor_Tensor Scalar"),
        **_overloads("gelu", _gelu, "default"),
        **_overloads("leaky_relu", _leaky_relu, "default"),
        **_overloads("clone", _same, "default"),
        **_overloads("_to_copy", _same, "default"),
        **_overloads("lift_fresh", _same, "default"),
        **_overloads("lift_fresh_copy", _same, "default"),
    }
)


def _bounds(given: Given) -> Given:
    """`hardtanh` in the names of `clamp`."""
    arguments = {**given.arguments, "min": given["min_val"], "max": given["max_val"]}
    return Given(arguments, given.outputs)
