"""Symbolic elements: polynomials for numbers, formulas for booleans.

Everything is kept in a normal form as it is made, so that equal elements mostly look equal and the solver is asked
about the rest only. Numbers stay numbers wherever they can, so that index arithmetic folds away. Functions such as exp
are uninterpreted, and applied to arguments in normal form.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from verify.evidence.smt.element_arithmetic import Element, Kind, Numbers, Unsupported, kind_of, number
from verify.evidence.smt.polynomial import Coefficient, Monomial, Polynomial, added, multiplied, scaled, tidy

MONOMIAL = 3  # steps; a step is about a microsecond
MONOMIALS = 1_000_000  # made in one proof: more is no small proof
EXPANDED = 64  # monomials of a product that is written out
CASES = 8  # monomials of the difference between the two cases of a condition that is written out


@dataclass(frozen=True, slots=True)
class Formula:
    """A boolean, by its number in `Terms.formulas`."""

    number: int


@dataclass(frozen=True, slots=True)
class Atom:
    """Something that polynomials are made of, and whether it stands for a real number.

    `what` is "symbol" (its name), "indicator" (a Formula), "function" (name, argument), "inverse" (what is inverted),
    "product" (two factors), "named" (what it is), "cases" (Formula, then, otherwise), "floor", "quotient" (dividend,
    divisor) or "power" (base, exponent).
    """

    what: str
    parts: tuple[Any, ...]
    real: bool


@dataclass
class ProofBudget:
    """The steps left to a proof. They are counted, not timed, so that no machine is too slow for a proof."""

    left: float = math.inf

    def spend(self, steps: float) -> None:
        """Raise Unsupported where there are not so many steps left."""
        self.left -= steps
        if self.left < 0:
            raise Unsupported("it takes too many steps")


class Terms(Numbers):
    """Symbolic elements of one proof. `conditions` collects what `require` was given, with what it is.

    `formulas` are tuples: ("symbol", name), ("zero", polynomial), ("negative", polynomial), ("not", Formula),
    ("and", Formula, Formula). What is made costs steps of `work`. Raises Unsupported beyond
    these, and beyond MONOMIALS.
    """

    def __init__(self, work: ProofBudget | None = None) -> None:
        self.conditions: list[tuple[Element, str]] = []
        self.work = work or ProofBudget()
        self.atoms: list[Atom] = []
        self.formulas: list[tuple[Any, ...]] = []
        self._atom_numbers: dict[Hashable, int] = {}
        self._formula_numbers: dict[Hashable, int] = {}
        self._indicators: set[int] = set()
        self._made = 0

    def symbol(self, name: str, kind: Kind) -> Element:
        """Return a value that can be anything."""
        if kind == "bool":
            return self._formula(("symbol", name), ("symbol", name))
        return self._atom(Atom("symbol", (name,), kind == "float"), name)

    def symbolic(self, a: Element) -> bool:
        return isinstance(a, Polynomial | Formula)

    # Numbers

    def add(self, a: Element, b: Element) -> Element:
        return self.sum((a, b))

    def sum(self, items: Sequence[Element]) -> Element:
        numbers = [number(i) for i in items if not self.symbolic(i)]
        terms = [self._polynomial(i) for i in items if self.symbolic(i)]
        constant = sum(numbers)
        if not terms:
            return constant
        real = any(t.real for t in terms) or any(isinstance(n, Fraction | float) for n in numbers)
        if constant:
            terms.append(_constant(constant))
        if len(terms) == 1 and terms[0].real == real:
            return terms[0]
        return self._counted(added(terms, real))

    def multiply(self, a: Element, b: Element) -> Element:
        if not self.symbolic(a) and not self.symbolic(b):
            return super().multiply(a, b)
        x, y = self._polynomial(a), self._polynomial(b)
        real = x.real or y.real
        for constant, other in ((x.constant, y), (y.constant, x)):
            if constant is not None:
                return self._counted(scaled(other, constant, real)) if constant else _zero(real)
        if len(x.items) * len(y.items) > EXPANDED:
            first, second = sorted((x, y), key=lambda p: hash(p.key))
            return self._atom(Atom("product", (first, second), real), (first.key, second.key))
        return self._counted(multiplied(x, y, real, self._indicators))

    def divide(self, a: Element, b: Element) -> Element:
        if not self.symbolic(a) and not self.symbolic(b):
            return super().divide(a, b)
        below = self._polynomial(b)
        if below.constant is not None:
            if below.constant == 0:
                raise Unsupported("it divides by 0")
            return self.multiply(Fraction(1) / Fraction(below.constant), a)
        inverse = self._atom(Atom("inverse", (below,), True), below.key)
        return self.multiply(inverse, a)

    def floor_divide(self, a: Element, b: int) -> Element:
        if self.symbolic(b) or b <= 0:
            raise Unsupported("an integer division by what is no positive number")
        if not self.symbolic(a):
            return super().floor_divide(a, b)
        above = self._polynomial(a)
        if above.real:
            raise Unsupported("an integer division of a floating number")
        return self._atom(Atom("quotient", (above, b), False), (above.key, b))

    def function(self, name: str, a: Element) -> Element:
        argument = self._polynomial(a)
        return self._atom(Atom("function", (name, argument), True), (name, argument.key))

    def named(self, a: Element) -> Element:
        if not isinstance(a, Polynomial) or len(a.items) <= 2:
            return a
        return self._atom(Atom("named", (a,), a.real), a.key)

    def floor(self, a: Element) -> Element:
        if not self.symbolic(a):
            return super().floor(a)
        argument = self._polynomial(a)
        return self._atom(Atom("floor", (argument,), True), argument.key)

    def power(self, a: Element, b: Element) -> Element:
        base, exponent = self._polynomial(a), self._polynomial(b)
        return self._atom(Atom("power", (base, exponent), True), (base.key, exponent.key))

    def truncated(self, a: Element) -> Element:
        if not self.symbolic(a):
            return super().truncated(a)
        raise Unsupported("it makes integers of floating numbers")

    # Booleans

    def equal(self, a: Element, b: Element) -> Element:
        if not self.symbolic(a) and not self.symbolic(b):
            return super().equal(a, b)
        if self.kind(a) == "bool" and self.kind(b) == "bool":
            return self.either(self.both(a, b), self.both(self.opposite(a), self.opposite(b)))
        difference = self.difference(a, b)
        if difference.constant is not None:
            return difference.constant == 0
        if difference.items[min(difference.items)] < 0:  # x = y and y = x are one formula
            difference = scaled(difference, -1, difference.real)
        return self._formula(("zero", difference), ("zero", difference.key))

    def less(self, a: Element, b: Element) -> Element:
        if not self.symbolic(a) and not self.symbolic(b):
            return super().less(a, b)
        difference = self.difference(a, b)
        if difference.constant is not None:
            return difference.constant < 0
        return self._formula(("negative", difference), ("negative", difference.key))

    def both(self, a: Element, b: Element) -> Element:
        if not isinstance(a, Formula):
            return b if a else False
        if not isinstance(b, Formula):
            return a if b else False
        if a == b:
            return a
        if self.formulas[a.number] == ("not", b) or self.formulas[b.number] == ("not", a):
            return False
        first, second = sorted((a, b), key=lambda f: f.number)
        return self._formula(("and", first, second), ("and", first, second))

    def opposite(self, a: Element) -> Element:
        if not isinstance(a, Formula):
            return super().opposite(a)
        known = self.formulas[a.number]
        return known[1] if known[0] == "not" else self._formula(("not", a), ("not", a))

    def where(self, condition: Element, a: Element, b: Element) -> Element:
        if not isinstance(condition, Formula):
            return a if condition else b
        if self.same(a, b):
            return a
        if self.kind(a) == "bool" and self.kind(b) == "bool":
            return self.either(self.both(condition, a), self.both(self.opposite(condition), b))
        x, y = self._polynomial(a), self._polynomial(b)
        difference = self.difference(x, y)
        if not difference.items:
            return x
        if len(difference.items) <= CASES:  # y + [condition] (x - y)
            indicator = self.indicator(condition)
            return self.sum((y, multiplied(indicator, difference, difference.real, self._indicators)))
        return self._atom(Atom("cases", (condition, x, y), difference.real), (condition, x.key, y.key))

    def indicator(self, condition: Formula) -> Polynomial:
        """Return 1 where the condition holds, 0 elsewhere: that of "not" is one minus that of what is negated."""
        known = self.formulas[condition.number]
        if known[0] == "not":
            inner = self.indicator(known[1])
            return added((_constant(1), scaled(inner, -1, False)), False)
        found = self._atom(Atom("indicator", (condition,), False), condition)
        self._indicators.add(next(iter(found.items))[0])
        return found

    def require(self, condition: Element, what: str) -> None:
        if self.symbolic(condition) or not condition:
            self.conditions.append((condition, what))

    # Kinds

    def kind(self, a: Element) -> Kind:
        """Return the kind of an element."""
        if isinstance(a, Formula):
            return "bool"
        if isinstance(a, Polynomial):
            return "float" if a.real else "int"
        return kind_of(a)

    def cast(self, a: Element, kind: Kind) -> Element:
        if not self.symbolic(a):
            return super().cast(a, kind)
        have = self.kind(a)
        if have == kind:
            return a
        if kind == "bool":
            return self.opposite(self.equal(a, 0))
        if kind == "float":
            return Polynomial(self._polynomial(a).items, True)
        return self._polynomial(a) if have == "bool" else self.truncated(a)

    def same(self, a: Element, b: Element) -> bool:
        if a is b:
            return True
        if isinstance(a, Formula) or isinstance(b, Formula):
            return bool(a == b)
        if isinstance(a, Polynomial) or isinstance(b, Polynomial):
            return not self.difference(a, b).items
        return super().same(a, b)

    def _polynomial(self, a: Element) -> Polynomial:
        """Return a number or a boolean as a polynomial."""
        if isinstance(a, Polynomial):
            return a
        return self.indicator(a) if isinstance(a, Formula) else _constant(number(a))

    def parted(self, monomial: Monomial) -> tuple[Monomial, Monomial]:
        """Return the indicators of a monomial, and the rest."""
        conditions = tuple(a for a in monomial if a in self._indicators)
        return conditions, tuple(a for a in monomial if a not in self._indicators)

    def difference(self, a: Element, b: Element) -> Polynomial:
        """Return the difference of two numbers."""
        x, y = self._polynomial(a), self._polynomial(b)
        return self._counted(added((x, scaled(y, -1, y.real)), x.real or y.real))

    # Tables

    def _atom(self, atom: Atom, key: Hashable) -> Polynomial:
        found = self._atom_numbers.setdefault((atom.what, atom.real, key), len(self.atoms))
        if found == len(self.atoms):
            self.atoms.append(atom)
        return self._counted(Polynomial({(found,): 1}, atom.real))

    def _formula(self, formula: tuple[Any, ...], key: Hashable) -> Formula:
        found = self._formula_numbers.setdefault(key, len(self.formulas))
        if found == len(self.formulas):
            self.formulas.append(formula)
        return Formula(found)

    def _counted(self, term: Polynomial) -> Polynomial:
        self._made += len(term.items)
        if self._made > MONOMIALS:
            raise Unsupported(f"it needs more than {MONOMIALS} monomials")
        self.work.spend(MONOMIAL * len(term.items))
        return term


def _constant(value: Element) -> Polynomial:
    if isinstance(value, float):
        value = Fraction(value)
    coefficient: Coefficient = tidy(value)
    return Polynomial({(): coefficient} if coefficient else {}, isinstance(value, Fraction))


def _zero(real: bool) -> Element:
    return Fraction(0) if real else 0
