"""Decide whether pairs of terms are equal for all values, cheapest method first; if not, find values that differ.

First by normal form: equal polynomials need no solver. Then by normal form after multiplying everything out; then value
by value, comparing the conditions under which each value counts; then by Z3, all at once. Z3 runs under a resource
limit, which it counts itself, so that a question has the same answer on every machine. Where Z3 answers "unknown",
nothing is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import z3  # type: ignore[import-untyped]

from verify.evidence.smt.algebra import Element
from verify.evidence.smt.errors import Unsupported
from verify.evidence.smt.polynomial import Coefficient, Monomial, Polynomial
from verify.evidence.smt.terms import Terms
from verify.evidence.smt.to_z3 import Translator

BLOWUP = 50  # how many times its length an expression may get when it is multiplied out
QUESTION = 2000  # steps of a question to the solver, whatever it is
RESOURCE = 0.3  # steps of one of Z3's resources


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call of the solver: Z3's `resources`, which do not depend on the machine or on what else runs there."""

    resources: int = 4_000_000


@dataclass(frozen=True)
class Verdict:
    """The solver's answer.

    reason  why it is not proved
    model   name -> value, where the two sides differ, if the solver found such values; functions such as exp are
            uninterpreted in it
    place   the number of the pair
    """

    proved: bool
    reason: str = ""
    model: dict[str, Element] | None = None
    place: int = 0


class Prover:
    """Proves pairs equal under assumptions, all from one `Terms`."""

    def __init__(self, terms: Terms, assumptions: Sequence[Element], limits: Limits) -> None:
        self.terms = terms
        self.limits = limits
        self.assumptions = [a for a in assumptions if terms.symbolic(a)]
        self.impossible = any(not terms.symbolic(a) and not a for a in assumptions)
        self.translator = Translator(terms)
        self._solver: Any = None
        self._quick: Any = None
        self._used = 0
        self._cancelling: dict[frozenset[tuple[Monomial, Coefficient]], bool] = {}

    def consistent(self) -> Verdict:
        """Return whether some values satisfy the assumptions: from contradictory ones, everything would follow."""
        if self.impossible:
            return Verdict(False, "the whole operator raises on all values")
        if not self.assumptions or self._check(True) == z3.sat:
            return Verdict(True)
        return Verdict(False, "no values are known on which the whole operator runs")

    def equal(self, pairs: Sequence[tuple[Element, Element]]) -> Verdict:
        """Prove that both terms of each pair are equal; stop at the first pair that is not proved."""
        for place, (a, b) in enumerate(pairs):
            if a is None or b is None:
                raise Unsupported("an output holds memory that was never written")
            if self.terms.same(a, b) or self._equal_written_out(a, b) or self._equal_by_cases(a, b):
                continue
            verdict = self._decide(self.terms.opposite(self.terms.equal(a, b)), place)
            if not verdict.proved:
                return verdict
        return Verdict(True)

    def _equal_written_out(self, a: Element, b: Element) -> bool:
        """Return whether two terms have the same sum of monomials after large products are multiplied out."""
        if self.terms.kind(a) == "bool" or self.terms.kind(b) == "bool":
            return False
        term = self.translator.polynomial(self.terms.difference(a, b))
        simple = z3.simplify(term, som=True, som_blowup=BLOWUP)
        if z3.is_int_value(simple):
            return bool(simple.as_long() == 0)
        return bool(z3.is_rational_value(simple)) and simple.as_fraction() == 0

    def _equal_by_cases(self, a: Element, b: Element) -> bool:
        """Return whether, for each product of values in the difference, the conditions under which it counts cancel.

        Sufficient, not necessary: conditions and values are treated as if they were independent.
        """
        if self.terms.kind(a) == "bool" or self.terms.kind(b) == "bool":
            return False
        by_value: dict[Monomial, dict[Monomial, Coefficient]] = {}
        for monomial, coefficient in self.terms.difference(a, b).items.items():
            conditions, values = self.terms.parted(monomial)
            by_value.setdefault(values, {})[conditions] = coefficient
        for counted in by_value.values():
            if not any(counted):
                return False  # a value that always counts does not cancel
        return all(self._cancel(Polynomial(counted, False)) for counted in by_value.values())

    def _cancel(self, counted: Polynomial) -> bool:
        if counted.key not in self._cancelling:
            if any(isinstance(c, Fraction) for c in counted.items.values()):
                counted = Polynomial(counted.items, True)
            wrong = self.terms.opposite(self.terms.equal(counted, 0))
            self._cancelling[counted.key] = self._decide(wrong, 0, quick=True).proved
        return self._cancelling[counted.key]

    def holds(self, conditions: Sequence[Element]) -> Verdict:
        """Prove that each condition follows from the assumptions."""
        known = set(self.assumptions)
        for place, condition in enumerate(conditions):
            if self.terms.symbolic(condition) and condition in known:
                continue
            wrong = self.terms.opposite(condition)
            if self.terms.symbolic(wrong) and self._check(wrong, quick=True) == z3.unsat:
                continue
            verdict = self._decide(wrong, place)
            if not verdict.proved:
                return verdict
        return Verdict(True)

    def _decide(self, wrong: Element, place: int, quick: bool = False) -> Verdict:
        """Decide whether `wrong`, a boolean, is unsatisfiable. `quick`: by the solver that is kept for many small
        questions."""
        if not self.terms.symbolic(wrong):
            return Verdict(False, "differs", {}, place) if wrong else Verdict(True)
        found = self._check(wrong, quick)
        if found == z3.unsat:
            return Verdict(True)
        if found == z3.sat:
            return Verdict(False, "differs", self._model(), place)
        return Verdict(False, f"the solver does not know ({self._solver.reason_unknown()})", None, place)

    def _check(self, wrong: Element, quick: bool = False) -> Any:
        """Ask Z3. Raises Unsupported where the steps of the proof are used up."""
        self.terms.work.spend(QUESTION)
        term = self.translator.formula(wrong) if self.terms.symbolic(wrong) else z3.BoolVal(True, self._context)
        self._solver = self._kept() if quick else self._fresh()
        self._solver.push()
        self._solver.add(term, *self.translator.laws)
        found = answer_of(self._solver)
        used = self._solver.statistics().get_key_value("rlimit count")
        self.terms.work.spend((used - self._used) * RESOURCE)
        self._used = used
        if quick:
            self._solver.pop()
        return found

    def _fresh(self) -> Any:
        solver = z3.Solver(ctx=self._context)
        solver.set("rlimit", self.limits.resources)
        solver.add(*(self.translator.formula(a) for a in self.assumptions))
        return solver

    def _kept(self) -> Any:
        if self._quick is None:
            self._quick = self._fresh()
        return self._quick

    @property
    def _context(self) -> Any:
        return self.translator.context

    def _model(self) -> dict[str, Element]:
        model = self._solver.model()
        return {d.name(): _value(model[d]) for d in model.decls() if d.arity() == 0}


def answer_of(solver: Any) -> Any:
    """Return what Z3 says. Raises KeyboardInterrupt where that came in between: Z3 takes the signal for itself."""
    found = solver.check()
    if found == z3.unknown and "keyboard" in solver.reason_unknown():
        raise KeyboardInterrupt
    return found


def _value(term: Any) -> Element:
    if z3.is_true(term) or z3.is_false(term):
        return bool(z3.is_true(term))
    if z3.is_int_value(term):
        return int(term.as_long())
    if z3.is_algebraic_value(term):
        term = term.approx(20)
    return Fraction(term.as_fraction())
