"""Elements as terms of Z3, in a context of their own."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import z3  # type: ignore[import-untyped]

from verify.evidence.smt.polynomial import Monomial, Polynomial
from verify.evidence.smt.terms import Formula, Terms

_POSITIVE = ("exp", "cosh")


class Translator:
    """Terms of Z3 for what `terms` made; each atom and formula is translated once."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.context = z3.Context()
        self.laws: list[Any] = []  # what is known of the functions that were translated
        self._atoms: dict[int, Any] = {}
        self._formulas: dict[int, Any] = {}

    def formula(self, formula: Formula) -> Any:
        """Translate to a boolean term."""
        if formula.number not in self._formulas:
            self._formulas[formula.number] = self._make_formula(self.terms.formulas[formula.number])
        return self._formulas[formula.number]

    def polynomial(self, polynomial: Polynomial) -> Any:
        """Translate to a real or an integer term."""
        parts = [self._monomial(m, c, polynomial.real) for m, c in polynomial.items.items()]
        if not parts:
            return self._number(0, polynomial.real)
        return z3.Sum(parts) if len(parts) > 1 else parts[0]

    def _number(self, value: int | Fraction, real: bool) -> Any:
        return z3.RealVal(value, self.context) if real else z3.IntVal(value, self.context)

    def _monomial(self, monomial: Monomial, coefficient: int | Fraction, real: bool) -> Any:
        """Translate a monomial: indicators become cases, the product of the rest where all conditions hold, 0
        elsewhere."""
        conditions = [a for a in monomial if self.terms.atoms[a].what == "indicator"]
        rest = [self._as(self._atom(a), real) for a in monomial if a not in conditions]
        factors = rest if coefficient == 1 and rest else [self._number(coefficient, real), *rest]
        term = z3.Product(factors) if len(factors) > 1 else factors[0]
        if not conditions:
            return term
        every = [self.formula(self.terms.atoms[a].parts[0]) for a in conditions]
        return z3.If(z3.And(every) if len(every) > 1 else every[0], term, self._number(0, real))

    def _as(self, term: Any, real: bool) -> Any:
        return z3.ToReal(term) if real and z3.is_int(term) else term

    def _real(self, polynomial: Polynomial) -> Any:
        return self._as(self.polynomial(polynomial), True)

    def _atom(self, number: int) -> Any:
        if number not in self._atoms:
            self._atoms[number] = self._make_atom(number)
        return self._atoms[number]

    def _make_atom(self, number: int) -> Any:
        atom = self.terms.atoms[number]
        if atom.what == "symbol":
            return z3.Real(atom.parts[0], self.context) if atom.real else z3.Int(atom.parts[0], self.context)
        if atom.what == "function":
            return self._applied(*atom.parts)
        if atom.what == "named":
            return self.polynomial(atom.parts[0])
        if atom.what == "inverse":
            return 1 / self._real(atom.parts[0])
        if atom.what == "product":
            a, b = (self._as(self.polynomial(p), atom.real) for p in atom.parts)
            return a * b
        if atom.what == "cases":
            condition, a, b = atom.parts
            x, y = (self._as(self.polynomial(p), atom.real) for p in (a, b))
            return z3.If(self.formula(condition), x, y)
        if atom.what == "floor":
            return z3.ToReal(z3.ToInt(self._real(atom.parts[0])))
        if atom.what == "quotient":  # Z3's integer division rounds down where the divisor is positive
            return self.polynomial(atom.parts[0]) / z3.IntVal(atom.parts[1], self.context)
        assert atom.what == "power", atom.what
        real = z3.RealSort(self.context)
        return z3.Function("power", real, real, real)(*(self._real(p) for p in atom.parts))

    def _applied(self, name: str, argument: Polynomial) -> Any:
        real = z3.RealSort(self.context)
        term = z3.Function(name, real, real)(self._real(argument))
        if name in _POSITIVE:
            self.laws.append(term > 0)
        elif name == "sqrt":
            self.laws.append(term >= 0)
        return term

    def _make_formula(self, formula: tuple[Any, ...]) -> Any:
        what, *parts = formula
        if what == "symbol":
            return z3.Bool(parts[0], self.context)
        if what == "not":
            return z3.Not(self.formula(parts[0]))
        if what == "and":
            return z3.And(self.formula(parts[0]), self.formula(parts[1]))
        term = self.polynomial(parts[0])
        return term == 0 if what == "zero" else term < 0
