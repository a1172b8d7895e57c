"""Decide whether pairs of terms are equal for all values, cheapest method first; if not, find values that differ.

First by normal form: equal polynomials need no solver. Then by normal form after multiplying everything out; then value
by value, comparing the conditions under which each value counts; then by Z3, all at once. Z3 runs under a resource
limit, which it counts itself, so that a question has the same answer on every machine. Where Z3 answers "unknown",
nothing is proved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any

import z3  # type: ignore[import-untyped]

from verify.evidence.smt.element_arithmetic import Element, Unsupported
from verify.evidence.smt.polynomial import Coefficient, Monomial, Polynomial
from verify.evidence.smt.terms import Formula, Terms

# Elements as terms of Z3, in a context of their own.

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


BLOWUP = 50  # how many times its length an expression may get when it is multiplied out
QUESTION = 2000  # steps of a question to the solver, whatever it is
_LOOK = 0.2  # seconds between two looks at the time that the solver takes
RESOURCE = 0.3  # steps of one of Z3's resources


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call of the solver: Z3's `resources`, which do not depend on the machine or on what else runs there. They
    leave out some of what it does: `deadline`, of this thread's processor time, ends that."""

    resources: int = 4_000_000
    deadline: float = inf


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
        if time.thread_time() > self.limits.deadline:
            raise Unsupported("the limit of processor time was reached")
        term = self.translator.formula(wrong) if self.terms.symbolic(wrong) else z3.BoolVal(True, self._context)
        self._solver = self._kept() if quick else self._fresh()
        self._solver.push()
        self._solver.add(term, *self.translator.laws)
        found = answer_of(self._solver, self.limits.deadline)
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


def answer_of(solver: Any, deadline: float = inf) -> Any:
    """Return what Z3 says by a deadline, as in `Limits`. Raises KeyboardInterrupt where that came in between: Z3 takes
    the signal for itself."""
    with _until(deadline, solver.ctx):
        found = solver.check()
    if found == z3.unknown and "keyboard" in solver.reason_unknown() and time.thread_time() <= deadline:
        raise KeyboardInterrupt
    return found


@contextmanager
def _until(deadline: float, context: Any) -> Iterator[None]:
    """Interrupt what Z3 does inside when this thread's processor time reaches the deadline."""
    if deadline == inf or not hasattr(time, "pthread_getcpuclockid"):
        yield
        return
    clock, ended = time.pthread_getcpuclockid(threading.get_ident()), threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK):
            if time.clock_gettime(clock) > deadline:
                context.interrupt()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _value(term: Any) -> Element:
    if z3.is_true(term) or z3.is_false(term):
        return bool(z3.is_true(term))
    if z3.is_int_value(term):
        return int(term.as_long())
    if z3.is_algebraic_value(term):
        term = term.approx(20)
    return Fraction(term.as_fraction())
