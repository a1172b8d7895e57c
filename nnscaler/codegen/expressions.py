"""Arguments of an operation as Python text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from op_registry.call import Call, DType, TensorArgument
from op_registry.expression import Coefficient, Expression


def literal(value: Any, variables: Sequence[str]) -> str:
    """Write one argument; `variables[i]` is the text of the call's i-th tensor."""
    match value:
        case TensorArgument(index=index):
            return variables[index]
        case DType(name=name):
            return f"dtypes.{name}"
        case Expression():
            return expression(value)
        case bool() | None | str():
            return repr(value)
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case int() | float() | complex():
            return repr(value)
        case list():
            return "[" + ", ".join(literal(v, variables) for v in value) + "]"
        case tuple():
            inside = ", ".join(literal(v, variables) for v in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
    raise AssertionError(f"no text for an argument of type {type(value).__name__}: {value!r}")


def expression(value: Expression) -> str:
    """Write an expression of the rank's place: `5 + 20 * self.tp.index`, `(7, 7, 6)[self.tp.index]`."""
    terms = [_term(f"self.{axis}.index", factor) for axis, factor in value.terms]
    if value.constant or not terms:
        terms.insert(0, str(value.constant))
    return " + ".join(terms)


def _term(index: str, factor: Coefficient) -> str:
    if isinstance(factor, tuple):
        return f"{factor}[{index}]"
    return index if factor == 1 else f"{factor} * {index}"


def arguments(call: Call, variables: Sequence[str]) -> list[str]:
    """Write all arguments of a call, positional ones first."""
    positional = [literal(v, variables) for v in call.args]
    return [*positional, *(f"{k}={literal(v, variables)}" for k, v in call.kwargs.items())]
