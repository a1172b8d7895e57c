"""Sums of monomials with exact coefficients: the normal form of what proofs compare.

A monomial is a sorted tuple of atoms (numbers that `terms.Terms` gives out): symbols, applied functions, and
indicators, which are 1 where a condition holds and 0 elsewhere, so that their square is themselves. Two equal
polynomials are equal functions, whatever the atoms are; the converse is for the solver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction

Monomial = tuple[int, ...]
Coefficient = int | Fraction


class Polynomial:
    """`items` has no zero coefficients; coefficients that are whole are ints. `real`: a real number, or an integer."""

    __slots__ = ("_key", "items", "real")

    def __init__(self, items: Mapping[Monomial, Coefficient], real: bool) -> None:
        self.items = items
        self.real = real
        self._key: frozenset[tuple[Monomial, Coefficient]] | None = None

    @property
    def key(self) -> frozenset[tuple[Monomial, Coefficient]]:
        """Equal for equal polynomials."""
        if self._key is None:
            self._key = frozenset(self.items.items())
        return self._key

    @property
    def constant(self) -> Coefficient | None:
        """The number that it is; None if it is none."""
        if not self.items:
            return 0
        return self.items[()] if len(self.items) == 1 and () in self.items else None


def tidy(value: Coefficient) -> Coefficient:
    """Write whole fractions as ints: faster, and one way to write each number."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value


def added(terms: Sequence[Polynomial], real: bool) -> Polynomial:
    """Return the sum."""
    items = dict(terms[0].items)
    for term in terms[1:]:
        for monomial, coefficient in term.items.items():
            total = items.get(monomial, 0) + coefficient
            if total:
                items[monomial] = tidy(total)
            else:
                del items[monomial]
    return Polynomial(items, real)


def scaled(term: Polynomial, factor: Coefficient, real: bool) -> Polynomial:
    """Return a number that is not zero times a polynomial."""
    factor = tidy(factor)
    return Polynomial({m: tidy(c * factor) for m, c in term.items.items()}, real)


def multiplied(a: Polynomial, b: Polynomial, real: bool, indicators: AbstractSet[int]) -> Polynomial:
    """Return the product; an indicator stands in a monomial once."""
    items: dict[Monomial, Coefficient] = {}
    for left, x in a.items.items():
        for right, y in b.items.items():
            monomial = _merged(left, right, indicators)
            total = items.get(monomial, 0) + x * y
            if total:
                items[monomial] = tidy(total)
            else:
                del items[monomial]
    return Polynomial(items, real)


def _merged(left: Monomial, right: Monomial, indicators: AbstractSet[int]) -> Monomial:
    if not left or not right:
        return left or right
    merged: Iterable[int] = sorted(left + right)
    if not indicators.isdisjoint(left):
        once: list[int] = []
        for atom in merged:
            if not once or once[-1] != atom or atom not in indicators:
                once.append(atom)
        merged = once
    return tuple(merged)
