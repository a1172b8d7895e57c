"""Sizes as they stand in a trace: integers, or expressions of symbols of which there is one for each identifier.

Under a split of some symbols (one identifier, or those of a concatenation), every size becomes a shard's size by
putting the shard's number for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

Size = Any  # int or sympy.Expr, whose classes carry no types
Symbols = frozenset[Any]  # of sympy.Symbol


def size_of(value: Any) -> Size:
    """Return the number, or the expression behind a symbolic one."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        expression = value.node.expr
        return int(expression) if expression.is_Integer else expression
    return value


@lru_cache(maxsize=65536)
def _symbols(expression: Any) -> Symbols:
    return frozenset(expression.free_symbols)


def symbols_of(value: Any) -> Symbols:
    """Return the symbols of an argument: of a number, or of all numbers of a list."""
    value = size_of(value)
    if isinstance(value, sympy.Basic):
        return _symbols(value)
    if isinstance(value, list | tuple):
        found: Symbols = frozenset()
        return found.union(*map(symbols_of, value))
    return frozenset()


def mentions(value: Any, split: Symbols) -> bool:
    """Return whether an argument depends on a symbol that is split."""
    return not split.isdisjoint(symbols_of(value))


def substituted(value: Any, replacements: Mapping[Any, Any]) -> Any:
    """Return the value, or what is nested in it, with other expressions for some symbols."""
    if isinstance(value, sympy.Basic):
        for _ in replacements:  # one may lead to another
            value = value.xreplace(replacements)
        return int(value) if value.is_Integer else value
    if isinstance(value, tuple):
        return tuple(substituted(item, replacements) for item in value)
    if isinstance(value, dict):
        return {key: substituted(item, replacements) for key, item in value.items()}
    return value


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of the sizes."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


@lru_cache(maxsize=65536)
def quotient(numerator: Size, denominator: Size) -> Size | None:
    """Return `numerator / denominator` where it is a whole number for all values of their symbols, else None."""
    if denominator == 0:
        return None
    if isinstance(numerator, int) and isinstance(denominator, int):
        return None if numerator % denominator else numerator // denominator
    ratio = sympy.sympify(numerator) / denominator
    found = ratio if _is_whole(ratio) else sympy.cancel(ratio)
    if not _is_whole(found):
        return None
    return int(found) if found.is_Integer else found


def _is_whole(ratio: Any) -> bool:
    return bool(sympy.fraction(ratio)[1] == 1 and ratio.is_integer)


@lru_cache(maxsize=65536)
def equal(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal for all values of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b or sympy.expand(a - b) == 0)


@lru_cache(maxsize=65536)
def is_linear(size: Size, split: Symbols) -> bool:
    """Return whether the sizes of disjoint parts add up to the whole's: every term has exactly one split symbol, once.

    `k - 1` is not linear in this sense: the parts would add up to less.
    """
    if not mentions(size, split):
        return False
    polynomial = sympy.sympify(size).as_poly(*sorted(symbols_of(size) & split, key=str))
    return polynomial is not None and all(sum(degrees) == 1 for degrees in polynomial.monoms())
