"""Check one choice in a number of parts: proved, or not and why, with a counter-example if there is one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from nnscaler.ir.operation_placement import Choice
from verify.evidence.oracle.tolerance import CEILING, NOISE_FACTOR, UNITS
from verify.evidence.smt.choice_equations import (
    Claims,
    Pairs,
    ShardRaises,
    Symbol,
    TracedCall,
    TracedShards,
    claims,
    make_problem,
    spread,
)
from verify.evidence.smt.decide_equality import Limits, Prover, Verdict
from verify.evidence.smt.element_arithmetic import Element, Kind, NoCall, Numbers, Unmet, Unsupported, kind_of_dtype
from verify.evidence.smt.terms import ProofBudget, Terms

DRAWS = 20  # random values that are tried where the solver's do not confirm
_CLOSE = 1e-9  # numbers that went through exp and the like
_UNIT = Fraction(1, 1 << 52)
_ROUNDED = "differs by no more than the floats of the code are rounded"


@dataclass(frozen=True)
class BoundedResult:
    """The result of checking one choice.

    reason           why it is not proved
    counter_example  a place, the values of the inputs there, and what came out, confirmed by exact arithmetic
    gradients        "computed", "by theorem" or "none"
    depends_on_rank  the rewritten call does
    constant         no output depends on an input, so that little is proved
    """

    proved: bool
    reason: str = ""
    counter_example: Mapping[str, str] | None = None
    gradients: str = "none"
    depends_on_rank: bool = False
    constant: bool = False


def check(traced: TracedCall, choice: Choice, parts: int, limits: Limits, work: ProofBudget) -> BoundedResult:
    """Check one choice. Raises Unsupported, `op_registry.spec.Refusal`, and whatever the operator raises on a shard."""
    problem = make_problem(traced, choice, parts)
    terms = Terms(work)
    found = claims(problem, terms, terms.symbol)
    prover = Prover(terms, found.assumed, limits)
    verdict = prover.consistent()
    if not verdict.proved:
        return BoundedResult(False, verdict.reason)
    if not any(pairs for _, pairs in found.equal):
        return BoundedResult(False, "there is nothing to compare")
    verdict = prover.holds(found.required)
    if not verdict.proved:
        return _refused(problem, "an index that a shard uses is in range", verdict)
    for what, pairs in found.equal:
        verdict = prover.equal(pairs)
        if not verdict.proved:
            return _refused(problem, what, verdict)
    outputs = [a for what, pairs in found.equal if what.startswith("output") for a, _ in pairs]
    constant = bool(traced.trace.inputs) and not any(terms.symbolic(a) for a in outputs)
    return BoundedResult(True, "", None, found.gradients, problem.depends_on_rank, constant)


def _refused(problem: TracedShards, what: str, verdict: Verdict) -> BoundedResult:
    """Search for a counter-example at random where the solver does not know."""
    found = Confirmation()
    example = confirm(problem, verdict.model or {}, found)
    if example is not None:
        return BoundedResult(False, f"{what}: differs", example)
    if found.rounded:
        return BoundedResult(False, f"{what}: {_ROUNDED}")
    if verdict.model is not None:
        return BoundedResult(False, f"{what}: differs only if functions such as exp are taken for any function")
    return BoundedResult(False, f"{what}: {verdict.reason}")


@dataclass
class Confirmation:
    """`rounded`: values were found on which the shards differ from the whole by rounding alone."""

    rounded: bool = False


def confirm(
    problem: TracedShards, model: Mapping[str, Element], found: Confirmation | None = None
) -> Mapping[str, str] | None:
    """Return values on which the shards really do not make up the whole: the solver's, or random ones.

    None if none do. Numbers of the code such as `1 / n` are rounded before they come here, so that what is equal in
    real numbers may differ by their rounding: by that alone it is not wrong.
    """
    for draw in range(-1, DRAWS):
        symbol = _chosen(model) if draw < 0 else _drawn(random.Random(draw), problem, positive=draw % 2 == 1)
        try:
            claimed = claims(problem, Numbers(), symbol)
        except ShardRaises as raised:
            return {**_shown(problem, symbol), "shard": str(raised)}
        except (NoCall, Unmet, Unsupported, ArithmeticError, ValueError):
            continue  # the whole raises, or a function is not defined there
        difference = _difference(claimed, partial(_moved, problem, symbol))
        if difference is not None and "tensor" in difference:
            return {**_shown(problem, symbol), **difference}
        if difference is not None and found is not None:
            found.rounded = True
    return None


def _moved(problem: TracedShards, symbol: Symbol) -> Claims | None:
    """Return what comes out where each input is moved by one unit of rounding, up or down: it shows how much rounding
    may grow to. None where it raises."""

    def moved(name: str, kind: Kind) -> Element:
        value = symbol(name, kind)
        if kind != "float" or not isinstance(value, int | Fraction):
            return value
        return Fraction(value) * (1 + random.Random(name).choice((-1, 1)) * _UNIT)

    try:
        return claims(problem, Numbers(), moved)
    except (NoCall, Unmet, Unsupported, ShardRaises, ArithmeticError, ValueError):
        return None


def _chosen(model: Mapping[str, Element]) -> Symbol:
    """Return the solver's values; whatever it leaves open is 0."""

    def symbol(name: str, kind: Kind) -> Element:
        return Numbers().cast(model.get(name, 0), kind)

    return symbol


def _drawn(generator: random.Random, problem: TracedShards, positive: bool) -> Symbol:
    """Draw small numbers, each when it is first asked for.

    `positive`: between 0 and 1, where logarithms are defined.
    """
    largest = max((size for p in problem.traced.trace.inputs for size in p.shape), default=2)
    draw: dict[Kind, Callable[[], Element]] = {
        "bool": lambda: generator.random() < 0.5,
        "int": lambda: generator.randrange(largest),
        "float": lambda: Fraction(generator.randint(1, 9), 10) if positive else Fraction(generator.randint(-6, 6), 2),
    }
    known: dict[str, Element] = {}

    def symbol(name: str, kind: Kind) -> Element:
        if name not in known:
            known[name] = draw[kind]()
        return known[name]

    return symbol


def _difference(found: Claims, moved: Callable[[], Claims | None]) -> Mapping[str, str] | None:
    """Return the first difference that is more than rounding; an empty one where all are no more, None where there are
    none."""
    rounded = False
    for number, (what, pairs) in enumerate(found.equal):
        allowed: Fraction | None = None
        for place, (a, b) in enumerate(pairs):
            if isinstance(a, float) or isinstance(b, float):
                close = abs(a - b) <= _CLOSE * max(1, abs(a))
            elif a == b:
                close = True
            elif isinstance(a, int) and isinstance(b, int):  # whole numbers are not rounded
                close = False
            else:
                allowed = _rounding(pairs, number, moved()) if allowed is None else allowed
                close = abs(a - b) <= allowed
                rounded |= close
            if not close:
                return {"tensor": f"{what}, element {place}", "expected": _text(a), "found": _text(b)}
    return {} if rounded else None


def _rounding(pairs: Pairs, number: int, moved: Claims | None) -> Fraction:
    """Return up to which difference the elements of a tensor differ by the rounding of numbers in the code."""
    exact = [(Fraction(a), Fraction(b)) for a, b in pairs if not isinstance(a, float) and not isinstance(b, float)]
    own = max((max(abs(a), abs(b)) for a, b in exact), default=Fraction(0))
    others = () if moved is None else moved.equal[number][1]
    steps = [
        abs(Fraction(a) - Fraction(other))
        for (a, _), (other, _) in zip(pairs, others, strict=False)
        if not isinstance(a, float) and not isinstance(other, float)
    ]
    largest = min(Fraction(NOISE_FACTOR) * max(steps, default=Fraction(0)), Fraction(CEILING) * own)
    return max(Fraction(UNITS) * _UNIT * own, largest)  # what the tests of an operator call rounding


def _shown(problem: TracedShards, symbol: Symbol) -> dict[str, str]:
    """Return the inputs of the whole operator."""
    shown: dict[str, str] = {}
    for i, (place, state) in enumerate(zip(problem.traced.trace.inputs, problem.states_in, strict=True)):
        kind = kind_of_dtype(place.dtype)
        values = spread(Numbers(), symbol, f"input {i}", kind, place.shape, state, len(problem.ranks)).whole
        texts = np.array([_text(v) for v in values.reshape(-1)], dtype=object).reshape(values.shape)
        shown[f"input {i}"] = str(texts.tolist()).replace("'", "")
    return shown


def _text(value: Element) -> str:
    return str(value) if isinstance(value, bool | int | Fraction) else f"{value:.10g}"
