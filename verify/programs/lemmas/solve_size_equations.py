"""Solve equations between sizes as they come, by unification.

It is Robinson's (1965) with polynomials in place of terms. An unknown size is a name of its own, for
example `?3`. An equation in which an unknown stands once, as a monomial by itself, solves it, and the solution is
substituted in all others. An equation that cannot be solved yet is kept, and tried again after each new solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod

# Sizes as polynomials of a few named sizes, with rational coefficients: `batch x sequence length / 2 + 1`.

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


class Conflict(Exception):
    """A symbol has to have one value; `symbols` are those, and the message says where and why."""

    def __init__(self, symbols: frozenset[str], message: str) -> None:
        super().__init__(message)
        self.symbols = symbols


@dataclass(frozen=True, slots=True)
class Unknown:
    """A number of the program that may be a symbol's: `sample` is its value, `place` says where it stands."""

    sample: int
    place: str


@dataclass
class Unifier:
    """`samples`: symbol -> its value in the sample batch. `solved`: unknown or symbol -> what it is."""

    samples: Mapping[str, int]
    unknowns: dict[str, Unknown] = field(default_factory=dict)
    solved: dict[str, Size] = field(default_factory=dict)
    pending: list[tuple[Size, Size, str]] = field(default_factory=list)
    near: dict[str, Size] = field(default_factory=dict)  # unknown -> a size that it may keep its distance from

    def fresh(self, sample: int, place: str, beside: Size | None = None) -> Size:
        """Return a size of which only its value in the sample is known; `beside`: one that it may depend on."""
        if sample <= 1:
            return number(sample)
        name = f"?{len(self.unknowns)}"
        self.unknowns[name] = Unknown(sample, place)
        if beside is not None:
            self.near[name] = beside
        return named(name)

    def known(self, size: Size) -> Size:
        """Return the size with all that has been found out."""
        while not size.names.isdisjoint(self.solved):
            size = size.at(self.solved)
        return size

    def equate(self, left: Size, right: Size, place: str) -> None:
        """Record that two sizes are equal. Raises Conflict."""
        difference = self.known(left) - self.known(right)
        if not difference.terms:
            return
        open_names = [n for n in difference.names if n in self.unknowns]
        for name in sorted(open_names, key=lambda n: int(n[1:]), reverse=True):
            found = _isolated(difference, name)
            if found is not None:
                self.solved[name] = found
                self.retry()
                return
        if open_names:
            self.pending.append((left, right, place))
            self._by_value(left, right)
            return
        self._relate(difference, place)

    def _relate(self, difference: Size, place: str) -> None:
        """Merge two symbols that must agree; fix the symbols in any other relation."""
        names = sorted(difference.names)
        if len(names) == 2 and difference in (named(names[0]) - named(names[1]), named(names[1]) - named(names[0])):
            self.solved[names[1]] = named(names[0])
            self.retry()
            return
        values = ", ".join(f"{n} is {self.samples[n]}" for n in names)
        raise Conflict(frozenset(names), f"{place} holds only where {values}")

    def retry(self) -> None:
        """Try again to solve the equations that were left over."""
        waiting, self.pending = self.pending, []
        for left, right, place in waiting:
            self.equate(left, right, place)

    def _by_value(self, left: Size, right: Size) -> None:
        """Solve products, if only one way is left in which unknowns are numbers or symbols of their values."""
        difference = self.known(left) - self.known(right)
        names = sorted(n for n in difference.names if n in self.unknowns)
        if len(names) > 3:
            return
        ways = [
            dict(zip(names, chosen, strict=True))
            for chosen in itertools.product(*(self.candidates(self.unknowns[n].sample) for n in names))
            if not difference.at(dict(zip(names, chosen, strict=True))).terms
        ]
        if len(ways) == 1:
            self.solved.update(ways[0])
            self.retry()

    def candidates(self, sample: int) -> Iterator[Size]:
        """Yield the sizes that a number of the program may stand for: itself, or products of symbols of that value."""
        yield number(sample)
        yield from symbols_of_value(sample, [n for n in self.samples if n not in self.solved], self.samples)

    def finish(self) -> None:
        """Numbers that no equation decides keep their distance from the size beside them (a slice that leaves out one).

        Raises Conflict where sizes are left of which it is not known how they follow from symbols.
        """
        for name, beside in self.near.items():
            if name not in self.solved:
                beside = self.known(beside)
                values = {**self.samples, **{n: u.sample for n, u in self.unknowns.items()}}
                distance = self.unknowns[name].sample - beside.value(values)
                if name not in beside.names and distance.denominator == 1:
                    self.solved[name] = beside + number(int(distance))
        self.retry()
        for name in [n for left, right, _ in self.pending for n in sorted((left - right).names)]:
            if name in self.unknowns and name not in self.solved:
                (itself, *others) = self.candidates(self.unknowns[name].sample)
                if not others:
                    self.solved[name] = itself
                    self.retry()
        for left, right, place in self.pending:
            names = self.known(left).names | self.known(right).names
            symbols = frozenset(n for n in names if n in self.samples)
            if symbols:
                raise Conflict(symbols, f"how {place} is made of sizes at other sizes is not known")

    def valued(self, values: Mapping[str, int], size: Size) -> int | None:
        """Return the size for these values of the symbols; None where it is not known or no whole number."""
        found = self.known(size)
        if any(n in self.unknowns for n in found.names):
            return None
        number_ = found.value(values)
        return int(number_) if number_.denominator == 1 else None


def symbols_of_value(sample: int, symbols: Sequence[str], samples: Mapping[str, int]) -> Iterator[Size]:
    """Yield the products of different symbols with this value."""
    for count in range(1, len(symbols) + 1):
        for chosen in itertools.combinations(symbols, count):
            if prod(samples[n] for n in chosen) == sample:
                yield product([named(n) for n in chosen])


def _isolated(difference: Size, name: str) -> Size | None:
    """Solve `difference = 0` for the name, where it occurs once and as a monomial of its own; None elsewhere."""
    with_name = [(m, c) for m, c in difference.terms if name in m]
    if len(with_name) != 1 or with_name[0][0] != (name,):
        return None
    return Size(tuple((m, -c / with_name[0][1]) for m, c in difference.terms if name not in m))


def join_names(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    listed = list(names)
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)
