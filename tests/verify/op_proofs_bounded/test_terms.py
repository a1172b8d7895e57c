"""Symbolic elements mean what numbers mean: random expressions, evaluated three ways."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import z3
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verify.evidence.smt.decide_equality import Limits, Prover, Translator, answer_of
from verify.evidence.smt.element_arithmetic import Numbers, Unsupported
from verify.evidence.smt.polynomial import Polynomial
from verify.evidence.smt.terms import Formula, Terms

NAMES = {"x": "float", "y": "float", "i": "int", "j": "int", "p": "bool", "q": "bool"}


def build(algebra: Numbers, leaves: dict[str, Any], generator: random.Random, depth: int, wanted: str) -> Any:
    """A random expression of a kind; the same generator builds the same one in every algebra."""
    if depth == 0:
        name = generator.choice([n for n, kind in NAMES.items() if kind == wanted])
        constant = {"float": Fraction(generator.randint(-4, 4), 2), "int": generator.randint(-2, 3), "bool": True}[
            wanted
        ]
        return leaves[name] if generator.random() < 0.8 else constant

    def part(kind: str) -> Any:
        return build(algebra, leaves, generator, depth - 1, kind)

    if wanted == "bool":
        number = generator.choice(["float", "int"])
        choices = [
            lambda: algebra.equal(part(number), part(number)),
            lambda: algebra.less(part(number), part(number)),
            lambda: algebra.less_equal(part(number), part("int")),
            lambda: algebra.both(part("bool"), part("bool")),
            lambda: algebra.either(part("bool"), part("bool")),
            lambda: algebra.opposite(part("bool")),
            lambda: algebra.where(part("bool"), part("bool"), part("bool")),
            lambda: algebra.equal(part("bool"), part("bool")),
            lambda: algebra.cast(part("int"), "bool"),
        ]
        return generator.choice(choices)()
    choices = [
        lambda: algebra.add(part(wanted), part(wanted)),
        lambda: algebra.subtract(part(wanted), part("int")),
        lambda: algebra.multiply(part(wanted), part(wanted)),
        lambda: algebra.multiply(part(wanted), part("bool")),
        lambda: algebra.where(part("bool"), part(wanted), part(wanted)),
        lambda: algebra.maximum(part(wanted), part(wanted)),
        lambda: algebra.minimum(part(wanted), part("int")),
        lambda: algebra.absolute(part(wanted)),
        lambda: algebra.sum([part(wanted), part("int"), part(wanted)]),
        lambda: algebra.sign(part(wanted)),
    ]
    if wanted == "int":
        choices += [lambda: algebra.floor_divide(part("int"), 3), lambda: algebra.cast(part("bool"), "int")]
    else:
        choices += [
            lambda: algebra.floor(part("float")),
            lambda: algebra.divide(part("float"), algebra.add(1, algebra.multiply(part("int"), 0))),
            lambda: algebra.divide(part("float"), algebra.add(1, algebra.raised(part("float"), 2))),
            lambda: algebra.cast(part("int"), "float"),
        ]
    return generator.choice(choices)()


def numbers(generator: random.Random) -> dict[str, Any]:
    draw = {"float": lambda: Fraction(generator.randint(-6, 6), 2), "int": lambda: generator.randint(-4, 4)}
    return {n: draw[kind]() if kind != "bool" else generator.random() < 0.5 for n, kind in NAMES.items()}


def of_z3(term: Any) -> Any:
    if z3.is_true(term) or z3.is_false(term):
        return bool(z3.is_true(term))
    return Fraction(term.as_long()) if z3.is_int_value(term) else term.as_fraction()


@pytest.mark.long
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.sampled_from(["float", "int", "bool"]), st.integers(1, 4))
def test_terms_equal_numbers(seed: int, wanted: str, depth: int) -> None:
    terms = Terms()
    symbols = {name: terms.symbol(name, kind) for name, kind in NAMES.items()}  # type: ignore[arg-type]
    element = build(terms, symbols, random.Random(seed), depth, wanted)
    translator = Translator(terms)
    for draw in range(3):
        values = numbers(random.Random(seed + draw))
        expected = build(Numbers(), values, random.Random(seed), depth, wanted)
        if not terms.symbolic(element):
            assert element == expected
            continue
        term = translator.formula(element) if isinstance(element, Formula) else translator.polynomial(element)
        context = translator.context
        made = {"float": (z3.Real, z3.RealVal), "int": (z3.Int, z3.IntVal), "bool": (z3.Bool, z3.BoolVal)}
        pairs = [(made[k][0](n, context), made[k][1](values[n], context)) for n, k in NAMES.items()]
        assert of_z3(z3.simplify(z3.substitute(term, *pairs))) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 3))
def test_what_is_proved_equal_is_equal(seed: int, depth: int) -> None:
    """Two random expressions: if they are proved equal, they are equal on random numbers."""
    terms = Terms()
    symbols = {name: terms.symbol(name, kind) for name, kind in NAMES.items()}  # type: ignore[arg-type]
    a = build(terms, symbols, random.Random(seed), depth, "int")
    b = build(terms, symbols, random.Random(seed % 97), depth, "int")
    decided = 0
    for x, y in ((a, b), (terms.multiply(a, b), terms.multiply(b, a)), (terms.add(a, terms.multiply(0, b)), a)):
        try:
            verdict = Prover(terms, [], Limits(200_000)).equal([(x, y)])
        except Unsupported:
            continue
        decided += 1
        if verdict.proved and x is a and y is b:
            for draw in range(20):
                values = numbers(random.Random(draw))
                left = build(Numbers(), values, random.Random(seed), depth, "int")
                assert left == build(Numbers(), values, random.Random(seed % 97), depth, "int")
        if (x, y) != (a, b):
            assert verdict.proved or "does not know" in verdict.reason
    assume(decided)


def test_indicators_are_idempotent_and_exclude_their_negation() -> None:
    terms = Terms()
    p, x = terms.symbol("p", "bool"), terms.symbol("x", "float")
    held = terms.where(p, x, 0)
    assert terms.same(terms.where(p, held, 0), held)
    assert terms.same(terms.where(terms.opposite(p), held, 0), 0)
    assert terms.same(terms.add(held, terms.where(p, 0, x)), x)


def test_uninterpreted_functions_know_equal_arguments_only() -> None:
    terms = Terms()
    x, y = terms.symbol("x", "float"), terms.symbol("y", "float")
    square = terms.multiply(terms.add(x, y), terms.add(x, y))
    written = terms.sum([terms.multiply(x, x), terms.multiply(2, terms.multiply(x, y)), terms.multiply(y, y)])
    prover = Prover(terms, [], Limits())
    assert prover.equal([(terms.function("tanh", square), terms.function("tanh", written))]).proved
    assert not prover.equal([(terms.function("tanh", x), terms.function("exp", x))]).proved
    assert not prover.equal([(terms.function("tanh", x), terms.function("tanh", y))]).proved


def test_large_products_are_still_compared() -> None:
    """A product that is not written out is the solver's business."""
    terms = Terms()
    x = [terms.symbol(f"x{i}", "float") for i in range(12)]
    a, b = terms.sum(x), terms.sum([terms.multiply(i + 1, e) for i, e in enumerate(x)])
    product = terms.multiply(a, b)
    assert isinstance(product, Polynomial)
    assert len(product.items) == 1
    assert terms.same(product, terms.multiply(b, a))
    written = terms.sum([terms.multiply(e, b) for e in x])
    assert Prover(terms, [], Limits()).equal([(product, written)]).proved


def test_assumptions() -> None:
    terms = Terms()
    i = terms.symbol("i", "int")
    inside = [terms.less_equal(0, i), terms.less(i, 4)]
    assert Prover(terms, inside, Limits()).consistent().proved
    assert Prover(terms, inside, Limits()).holds([terms.less(i, 5)]).proved
    assert not Prover(terms, inside, Limits()).holds([terms.less(i, 3)]).proved
    assert not Prover(terms, [*inside, terms.less(i, 0)], Limits()).consistent().proved
    assert not Prover(terms, [False], Limits()).consistent().proved


def test_a_hard_equation_is_not_proved_without_resources() -> None:
    """max(a b, a b + c c) = a b + c c is true, and takes more than one step."""
    terms = Terms()
    a, b, c = (terms.symbol(name, "float") for name in "abc")
    ab, cc = terms.multiply(a, b), terms.multiply(c, c)
    pair = (terms.maximum(ab, terms.add(ab, cc)), terms.add(ab, cc))
    verdict = Prover(terms, [], Limits(resources=1)).equal([pair])
    assert not verdict.proved
    assert verdict.model is None
    assert "does not know" in verdict.reason
    assert Prover(terms, [], Limits()).equal([pair]).proved


def test_integer_division_is_of_integers() -> None:
    terms = Terms()
    x = terms.symbol("x", "float")
    with pytest.raises(Unsupported):
        terms.floor_divide(x, 2)
    with pytest.raises(Unsupported):
        terms.floor_divide(terms.symbol("i", "int"), 0)
    with pytest.raises(Unsupported):
        terms.cast(x, "int")


def test_ctrl_c_ends_a_question_to_the_solver(ctrl_c: Callable[[], None]) -> None:
    """Z3 takes the signal for itself; it must not be lost."""
    context = z3.Context()
    x, y, z = (z3.Int(name, context) for name in "xyz")
    solver = z3.Solver(ctx=context)
    solver.add(x**3 + y**3 + z**3 == 114, x > 10)  # nobody knows
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
        answer_of(solver)
