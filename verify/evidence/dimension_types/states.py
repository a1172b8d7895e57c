"""The abstract domain of the proofs: the state of a tensor while one identifier is split, or partial sums come in.

| state                | each rank holds                                                                        |
|----------------------|----------------------------------------------------------------------------------------|
| Same                 | the whole tensor, equal on all ranks                                                   |
| Shard(dim, outer)    | a shard: `dim` viewed as (outer, split, inner), and a part of the middle one            |
| Shard(dim, None)     | the same, of a tensor whose entries are equal along `dim`: a shard under any outer     |
| PartialSum           | a term: the sum over ranks is the tensor                                               |
| PartialMax           | a candidate: the maximum over ranks is the tensor                                      |
| Constant             | one number everywhere, the same in the whole tensor and on all ranks                   |
| Zero                 | zeros: a Constant, and also a PartialSum                                               |
| Unknown(reason)      | nothing is known                                                                       |

Which part of the middle one a rank holds does not matter: any disjoint sets of indices that together are all of them,
in rising order. So what is proved of `Shard` holds for every number of parts, even and uneven, and every stride.
`sections`: the dim is a concatenation of parts of these sizes, each with a symbol of its own that is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

# Sizes as they stand in a trace: integers, or expressions of symbols of which there is one for each identifier.
# Under a split of some symbols (one identifier, or those of a concatenation), every size becomes a shard's size by
# putting the shard's number for each of them.

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


@dataclass(frozen=True, slots=True)
class Unknown:
    """`reason`: the operator that lost it, and why."""

    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Same:
    def __str__(self) -> str:
        return "the same on every rank"


@dataclass(frozen=True, slots=True)
class PartialSum:
    def __str__(self) -> str:
        return "a partial sum"


@dataclass(frozen=True, slots=True)
class PartialMax:
    def __str__(self) -> str:
        return "a partial maximum"


@dataclass(frozen=True, slots=True)
class Constant:
    def __str__(self) -> str:
        return "a constant"


@dataclass(frozen=True, slots=True)
class Zero:
    def __str__(self) -> str:
        return "zero"


@dataclass(frozen=True, slots=True)
class Shard:
    """`outer` None: entries are equal along `dim`."""

    dim: int
    outer: Size | None = 1
    sections: tuple[Size, ...] = ()

    def __str__(self) -> str:
        if self.sections:
            return f"a shard of dim {self.dim} in sections"
        if self.outer is None or self.outer == 1:
            return f"a shard of dim {self.dim}"
        return f"a shard of dim {self.dim} with outer {self.outer}"


State = Unknown | Same | PartialSum | PartialMax | Constant | Zero | Shard

SAME, PARTIAL_SUM, PARTIAL_MAX, CONSTANT, ZERO = Same(), PartialSum(), PartialMax(), Constant(), Zero()


def split_dims(sizes: tuple[Size, ...], split: Symbols) -> tuple[int, ...]:
    """Return the dims whose sizes depend on what is split."""
    return tuple(d for d, size in enumerate(sizes) if mentions(size, split))


def checked(state: State, sizes: tuple[Size, ...], split: Symbols) -> State:
    """Return the state, or Unknown where no tensor of these sizes can be in it.

    A tensor has a size that depends on what is split just when it is a shard of that dim, and of no other.
    """
    if isinstance(state, Unknown | Constant | Zero):
        return state
    dims = split_dims(sizes, split)
    if not isinstance(state, Shard):
        return Unknown(f"{state}, with a size that is split") if dims else state
    if dims != (state.dim,):
        return Unknown(f"{state}, with sizes {sizes} where {sorted(map(str, split))} are split")
    return state if _divides(state, sizes[state.dim], split) else Unknown(f"dim {state.dim} is not a product")


def _divides(state: Shard, size: Size, split: Symbols) -> bool:
    """Return whether the dim can be viewed as the state says."""
    if state.sections:
        total = sum(state.sections)
        return equal(total, size) and all(_one_factor(s, 1, split) for s in state.sections) and state.outer == 1
    return _one_factor(size, 1 if state.outer is None else state.outer, split)


def _one_factor(size: Size, outer: Size, split: Symbols) -> bool:
    """Return whether `size` is outer * (one split symbol) * inner."""
    inside = symbols_of(size) & split
    if len(inside) != 1 or mentions(outer, split):
        return False
    (symbol,) = inside
    inner = quotient(size, outer * symbol)
    return inner is not None and not mentions(inner, split)


def join(a: Shard, b: Shard) -> Shard | None:
    """Join the states of two shards of one dim that are read together; None if they hold different parts."""
    if a.outer is None:
        return b
    if b.outer is None:
        return a
    same = len(a.sections) == len(b.sections) and all(map(equal, a.sections, b.sections)) and equal(a.outer, b.outer)
    return a if same else None
