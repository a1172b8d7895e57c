"""Conditions on sizes: every split divides, every factor is a whole number. Simplified symbolically, checked by Z3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm, prod

import z3  # type: ignore[import-untyped]

from nnscaler.ir.placement import Split
from verify.evidence.smt.decide_equality import answer_of
from verify.programs.lemmas.statement import Obligation
from verify.programs.lemmas.symbols import Size, number, of_terms
from verify.programs.lemmas.unify import Conflict, Unifier, symbols_of_value

LIMIT = 200_000  # of Z3's resource units, some 0.1 s, for one condition


@dataclass(frozen=True)
class Divides:
    """`modulus` divides `size`. `axes`: (name, size) of those that split it; empty for a factor of a dim."""

    size: Size
    modulus: int
    axes: tuple[tuple[str, int], ...]
    place: str

    def __str__(self) -> str:
        text = f"({self.size})" if len(self.size.terms) > 1 else str(self.size)
        return f"{text} divisible by {self.modulus}"


def of_splits(
    obligation: Obligation, identifiers: Mapping[str, Size], unifier: Unifier, place: str
) -> Iterator[Divides]:
    """Yield the conditions of one operation under the choices of an obligation. Raises Conflict."""
    bound = obligation.signature.bound
    if bound is None:
        return
    splits: dict[str, list[tuple[Split, tuple[str, int]]]] = {}
    for choice, axis in zip(obligation.choices, obligation.axes, strict=True):
        if isinstance(choice, Split) and axis[1] > 1:
            for member in bound.tied.get(choice.identifier, (choice.identifier,)):
                splits.setdefault(member, []).append((choice, axis))
    for name, made in splits.items():
        for size in _readings(unifier, identifiers[name]) if name in identifiers else ():
            yield from _of_identifier(size, made, unifier.samples, place)


def _readings(unifier: Unifier, size: Size) -> Iterator[Size]:
    """Yield the size, with every symbol for a number of which it is not known whether it is one."""
    size = unifier.known(size)
    name = next((n for n in size.names if n in unifier.unknowns), None)
    if name is None:
        yield size
        return
    for meant in unifier.candidates(unifier.unknowns[name].sample):
        yield from _readings(unifier, size.at({name: meant}))


def _of_identifier(
    size: Size, made: Sequence[tuple[Split, tuple[str, int]]], samples: Mapping[str, int], place: str
) -> Iterator[Divides]:
    if size.constant is not None:
        return
    modulus, axes = 1, []
    for split, (axis, parts) in made:
        if split.sections:
            raise Conflict(size.names, f"{place} is split by sections, which are numbers")
        if split.sizes:
            raise Conflict(size.names, f"{place} is split into the sizes {split.sizes}, which are numbers")
        within = _strides(size, split.outer, [p for _, (_, p) in made], samples)
        if within is not None:
            yield Divides(within, parts, ((axis, parts),), place)
        else:
            modulus = lcm(modulus, split.outer * parts)
            axes.append((axis, parts))
    if axes:
        yield Divides(size, modulus, tuple(axes), place)


def _strides(size: Size, outer: int, parts: Sequence[int], samples: Mapping[str, int]) -> Size | None:
    """Divide a size by an outer that symbols account for, up to a factor; None for an outer that other axes make."""
    if outer == 1 or any(prod(parts[:i]) == outer or parts[i] == outer for i in range(len(parts))):
        return None
    names = sorted(size.names & set(samples))
    for times in (n for n in range(1, outer) if outer % n == 0):
        for symbols in symbols_of_value(outer // times, names, samples):
            left = size.over(symbols * number(times))
            if left is not None:
                return left
    return None


def of_factors(identifiers: Mapping[str, Size], unifier: Unifier, place: str) -> Iterator[Divides]:
    """Yield the conditions that sizes of identifiers are whole numbers."""
    for found in (reading for size in identifiers.values() for reading in _readings(unifier, size)):
        scale = lcm(*(c.denominator for _, c in found.terms)) if found.terms else 1
        if scale > 1:
            yield Divides(found * of_terms({(): Fraction(scale)}), scale, (), place)


@dataclass(frozen=True)
class Simplified:
    """`divisors`: of each symbol, with the axes that ask for it. `others`: conditions on several, or with a rest."""

    divisors: Mapping[str, int]
    axes: Mapping[str, tuple[str, ...]]
    others: tuple[Divides, ...]


def simplify(conditions: Iterable[Divides], symbols: Iterable[str]) -> Simplified:
    """Return one divisor per symbol, and what does not follow from these."""
    divisors = dict.fromkeys(symbols, 1)
    axes: dict[str, dict[str, None]] = {name: {} for name in divisors}
    rest: dict[tuple[Size, int], Divides] = {}
    for condition in conditions:
        alone = _alone(condition)
        if alone is None or alone[0] not in divisors:
            rest.setdefault((condition.size, condition.modulus), condition)
            continue
        name, divisor = alone
        divisors[name] = lcm(divisors[name], divisor)
        if divisor > 1:
            axes[name].update({axis: None for axis, _ in condition.axes})
    kept: list[Divides] = []
    for condition in rest.values():
        if not follows(condition, divisors, kept):
            kept.append(condition)
    return Simplified(divisors, {name: tuple(found) for name, found in axes.items()}, tuple(kept))


def _alone(condition: Divides) -> tuple[str, int] | None:
    """(symbol, divisor) where the size is a multiple of one symbol."""
    if len(condition.size.terms) != 1:
        return None
    ((monomial, value),) = condition.size.terms
    if len(monomial) != 1:
        return None
    whole = value.denominator * condition.modulus
    return monomial[0], whole // gcd(value.numerator, whole)


def follows(condition: Divides, divisors: Mapping[str, int], others: Sequence[Divides]) -> bool:
    """Return whether Z3 proves that the condition follows from the divisors and the other conditions.

    "Unknown" counts as no, and so does a size whose symbols are not all known.
    """
    if not condition.size.names <= set(divisors):
        return False
    solver = z3.Solver()
    solver.set("rlimit", LIMIT)
    variables: dict[str, z3.ArithRef] = {}
    for name, divisor in divisors.items():
        times = z3.Int(f"times {name}")
        solver.add(times >= 1)
        variables[name] = divisor * times
    for other in others:
        if not other.size.names <= set(divisors):
            continue
        solver.add(_expression(other.size, variables) % other.modulus == 0)
    solver.add(_expression(condition.size, variables) % condition.modulus != 0)
    return bool(answer_of(solver) == z3.unsat)


def _expression(size: Size, variables: Mapping[str, z3.ArithRef]) -> z3.ArithRef:
    """Return the size as an integer term: its coefficients are whole here."""
    total = z3.IntVal(0)
    for monomial, value in size.terms:
        term = z3.IntVal(int(value))
        for name in monomial:
            term = term * variables[name]
        total = total + term
    return total
