"""Arithmetic on the elements that operators compute with: exact numbers, or symbols.

An element of a tensor is a number (bool, int, Fraction; float only where a function such as exp made it) or, in
`terms.Terms`, a term of Z3. The semantics of operators are written once against this interface: on numbers they are
tested against torch, on terms they prove. Floating point numbers are real numbers here: rounding is no part of a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal

# Exceptions that say why something is not proved.


class Unsupported(Exception):
    """Outside of what can be proved here; the message is the reason, as a phrase."""


class Unmet(Exception):
    """Numbers on which an operator raises: an index out of range."""


class NoCall(Exception):
    """The whole operator does not run on these sizes, although its trace did: other sizes are to be tried."""


Element = Any  # bool | int | Fraction | float | z3.ExprRef
Kind = Literal["bool", "int", "float"]

FUNCTIONS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "exp": math.exp,
        "log": math.log,
        "sqrt": math.sqrt,
        "sin": math.sin,
        "cos": math.cos,
        "tan": math.tan,
        "asin": math.asin,
        "acos": math.acos,
        "atan": math.atan,
        "sinh": math.sinh,
        "cosh": math.cosh,
        "tanh": math.tanh,
        "asinh": math.asinh,
        "acosh": math.acosh,
        "atanh": math.atanh,
        "erf": math.erf,
        "lgamma": math.lgamma,
    }
)
"""Functions without algebraic laws here, on numbers. Everything else is written with these."""


class Numbers:
    """Exact arithmetic on numbers. Subclasses add symbolic elements."""

    def add(self, a: Element, b: Element) -> Element:
        return number(a) + number(b)

    def subtract(self, a: Element, b: Element) -> Element:
        return self.add(a, self.multiply(-1, b))

    def multiply(self, a: Element, b: Element) -> Element:
        return number(a) * number(b)

    def divide(self, a: Element, b: Element) -> Element:
        """Return the real quotient. Raises ZeroDivisionError on numbers."""
        a, b = number(a), number(b)
        return a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b)

    def floor_divide(self, a: Element, b: int) -> Element:
        """Return the quotient of integers, rounded down; `b` is positive."""
        return number(a) // b

    def equal(self, a: Element, b: Element) -> Element:
        return bool(number(a) == number(b))

    def less(self, a: Element, b: Element) -> Element:
        return bool(number(a) < number(b))

    def both(self, a: Element, b: Element) -> Element:
        return bool(a) and bool(b)

    def opposite(self, a: Element) -> Element:
        """Return not `a`."""
        return not a

    def where(self, condition: Element, a: Element, b: Element) -> Element:
        return a if condition else b

    def function(self, name: str, a: Element) -> Element:
        """Apply one of FUNCTIONS. Raises ValueError or OverflowError on numbers outside its domain."""
        return FUNCTIONS[name](float(number(a)))

    def floor(self, a: Element) -> Element:
        """Return the greatest integer below, as a float."""
        return Fraction(math.floor(number(a)))

    def power(self, a: Element, b: Element) -> Element:
        """Return a power that is none of those that `raised` writes out."""
        return float(number(a)) ** float(number(b))

    def require(self, condition: Element, what: str) -> None:
        """Require a condition that the operator checks. Raises Unmet on numbers that do not fulfil it."""
        if not condition:
            raise Unmet(what)

    def named(self, a: Element) -> Element:
        """Return the same element.

        Symbolic ones become one symbol with a definition: where the whole and the shards compute the same intermediate
        values, nothing is gained by writing them out.
        """
        return a

    # What follows is written with the above.

    def sum(self, items: Sequence[Element]) -> Element:
        return reduce(self.add, items, 0)

    def dot(self, a: Sequence[Element], b: Sequence[Element]) -> Element:
        return self.sum([self.multiply(x, y) for x, y in zip(a, b, strict=True)])

    def less_equal(self, a: Element, b: Element) -> Element:
        return self.opposite(self.less(b, a))

    def either(self, a: Element, b: Element) -> Element:
        return self.opposite(self.both(self.opposite(a), self.opposite(b)))

    def maximum(self, a: Element, b: Element) -> Element:
        return self.where(self.less(a, b), b, a)

    def minimum(self, a: Element, b: Element) -> Element:
        return self.where(self.less(b, a), b, a)

    def negative(self, a: Element) -> Element:
        return self.multiply(-1, a)

    def absolute(self, a: Element) -> Element:
        return self.where(self.less(a, 0), self.negative(a), a)

    def sign(self, a: Element) -> Element:
        return self.where(self.less(0, a), 1, self.where(self.less(a, 0), -1, 0))

    def reciprocal(self, a: Element) -> Element:
        return self.divide(1, a)

    def raised(self, a: Element, exponent: Element) -> Element:
        """Return `a` to a power: small whole powers and square roots are written out."""
        if isinstance(exponent, bool | int | float | Fraction) and 2 * exponent == int(2 * exponent):
            whole, half = divmod(int(2 * exponent), 2)
            if 0 <= whole <= 6 or (-3 <= whole < 0):
                base = a if whole >= 0 else self.reciprocal(a)
                result = reduce(self.multiply, [base] * abs(whole), 1)
                return self.multiply(result, self.function("sqrt", a)) if half else result
        return self.power(a, exponent)

    def cast(self, a: Element, kind: Kind) -> Element:
        """Convert to an element of a tensor of this kind. Raises Unsupported for a float that is made an integer."""
        have = self.kind(a)
        if have == kind:
            return a
        if kind == "bool":
            return self.opposite(self.equal(a, 0))
        if have == "float":
            return self.truncated(a)
        return number(a) if kind == "int" else Fraction(number(a))

    def truncated(self, a: Element) -> Element:
        """Return a float as an integer, rounded towards 0."""
        return int(a)

    def same(self, a: Element, b: Element) -> bool:
        """Return whether two elements are certainly equal."""
        return a is b or (not self.symbolic(a) and not self.symbolic(b) and bool(a == b))

    def kind(self, a: Element) -> Kind:
        """Return the kind of an element."""
        return kind_of(a)

    def symbolic(self, a: Element) -> bool:
        """Return whether the element is not a number."""
        return False


def number(a: Element) -> Element:
    """Return a boolean as 0 or 1.

    Raises Unsupported for an element that nothing was written to, for infinity and NaN.
    """
    if a is None:
        raise Unsupported("it reads memory that was never written")
    if isinstance(a, bool):
        return int(a)
    if isinstance(a, float) and not math.isfinite(a):
        raise Unsupported(f"it computes with {a}")
    return a


def kind_of(a: Element) -> Kind:
    """Return the kind of a number."""
    if a is None:
        raise Unsupported("it reads memory that was never written")
    return "bool" if isinstance(a, bool) else "int" if isinstance(a, int) else "float"


def literal(value: Any) -> Element:
    """Return a Python number as an element: floats become exact fractions. Raises Unsupported for infinity and NaN."""
    if isinstance(value, float):
        return Fraction(number(value))
    return value


def kind_of_dtype(dtype: str) -> Kind:
    """Return the kind of elements in a tensor of this dtype."""
    if dtype == "bool":
        return "bool"
    return "int" if dtype.startswith(("int", "uint")) else "float"
