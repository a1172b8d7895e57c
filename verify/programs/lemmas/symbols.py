"""Sizes as polynomials of a few named sizes, with rational coefficients: `batch x sequence length / 2 + 1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod

Monomial = tuple[str, ...]  # names, sorted; () is the constant term


@dataclass(frozen=True)
class Size:
    """`terms`: (monomial, coefficient) in order; none of the coefficients is zero."""

    terms: tuple[tuple[Monomial, Fraction], ...]

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    @property
    def constant(self) -> int | None:
        """The number that it is; None where it depends on a name or is no whole number."""
        if not self.terms:
            return 0
        ((monomial, value), *rest) = self.terms
        return int(value) if not rest and not monomial and value.denominator == 1 else None

    def __add__(self, other: Size) -> Size:
        found = dict(self.terms)
        for monomial, value in other.terms:
            found[monomial] = found.get(monomial, Fraction(0)) + value
        return of_terms(found)

    def __sub__(self, other: Size) -> Size:
        return self + other * number(-1)

    def __mul__(self, other: Size) -> Size:
        found: dict[Monomial, Fraction] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                monomial = tuple(sorted((*left, *right)))
                found[monomial] = found.get(monomial, Fraction(0)) + a * b
        return of_terms(found)

    def over(self, other: Size) -> Size | None:
        """Return the quotient, where `other` is one term that divides each of this one's; else None."""
        if len(other.terms) != 1:
            return number(1) if self == other else None
        ((divisor, value),) = other.terms
        found: dict[Monomial, Fraction] = {}
        for monomial, mine in self.terms:
            left = list(monomial)
            for name in divisor:
                if name not in left:
                    return None
                left.remove(name)
            found[tuple(left)] = mine / value
        return of_terms(found)

    def at(self, values: Mapping[str, Size]) -> Size:
        """Substitute sizes for some names."""
        if self.names.isdisjoint(values):
            return self
        total = number(0)
        for monomial, value in self.terms:
            term = Size((((), value),))
            for name in monomial:
                term = term * values.get(name, named(name))
            total = total + term
        return total

    def value(self, values: Mapping[str, int]) -> Fraction:
        """Return the number for these values of all names."""
        return sum((c * prod(values[n] for n in monomial) for monomial, c in self.terms), Fraction(0))

    def __str__(self) -> str:
        shown: list[str] = []
        for monomial, value in sorted(self.terms, key=lambda t: (-len(t[0]), t[0])):
            top = [*([str(abs(value.numerator))] if abs(value.numerator) != 1 or not monomial else []), *monomial]
            text = " x ".join(top) + (f" / {value.denominator}" if value.denominator != 1 else "")
            shown.append(("- " if value < 0 else "+ " if shown else "") + text)
        return " ".join(shown) or "0"


def of_terms(terms: Mapping[Monomial, Fraction]) -> Size:
    """Return the size with these terms, zeros left out."""
    return Size(tuple(sorted((m, c) for m, c in terms.items() if c)))


def number(value: int) -> Size:
    return of_terms({(): Fraction(value)})


def named(name: str) -> Size:
    return Size((((name,), Fraction(1)),))


def product(sizes: list[Size]) -> Size:
    """Their product."""
    total = number(1)
    for size in sizes:
        total = total * size
    return total


def total(sizes: list[Size]) -> Size:
    """Return the sum of the sizes."""
    found = number(0)
    for size in sizes:
        found = found + size
    return found
