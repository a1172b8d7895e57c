"""Conditions on sizes: every split divides, every factor is a whole number. Simplified symbolically, checked by Z3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm, prod

import z3  # type: ignore[import-untyped]

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundDim
from op_registry.annotation.syntax_tree import UNSPLIT

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from verify.evidence.smt.decide_equality import answer_of
from verify.programs.lemmas.solve_size_equations import (
    Conflict,
    Size,
    Unifier,
    number,
    of_terms,
    product,
    symbols_of_value,
    total,
)
from verify.programs.typing import Obligation

# Symbolic sizes of every tensor of a graph, by the bound annotations of its operations.
# A dim of a single identifier has the identifier's size, a group's is a product, a concatenation's a sum. A number
# that stands for itself in the annotation, and the size of an identifier that only an output has, are numbers of
# the program (`arange(16)`, the sizes of a `view`): they are taken for a symbol where the equations say so.

Shape = tuple[Size, ...]


@dataclass
class Followed:
    """`shapes`: of every tensor. `identifiers`: operation -> identifier -> size."""

    unifier: Unifier
    shapes: dict[str, Shape] = field(default_factory=dict)
    identifiers: dict[str, Mapping[str, Size]] = field(default_factory=dict)


def follow(
    graph: Graph, signatures: Mapping[str, Signature], inputs: Mapping[str, Shape], samples: Mapping[str, int]
) -> Followed:
    """Infer the symbolic sizes of all tensors. Raises Conflict.

    `inputs`: the symbolic shapes of the graph's inputs; `samples`: the symbols' values.
    """
    found = Followed(Unifier(samples))
    for name, tensor in graph.tensors.items():
        if tensor.role != "activation":
            found.shapes[name] = inputs.get(name, tuple(map(number, tensor.shape)))
    for op in graph.operations:
        _operation(graph, op, signatures[op.name], found)
    for buffer, value in graph.updates:
        for left, right in zip(found.shapes[buffer], found.shapes[value], strict=True):
            found.unifier.equate(left, right, f"the buffer {buffer}")
    found.unifier.finish()
    return found


def place_of(op: Operation) -> str:
    """`aten.view.default at gpt.py:42`."""
    if op.where is None:
        return f"{op.operator} ({op.name})"
    return f"{op.operator} at {op.where.file.rpartition('/')[2]}:{op.where.line}"


def _operation(graph: Graph, op: Operation, signature: Signature, found: Followed) -> None:
    shapes = [tuple(found.unifier.known(s) for s in found.shapes[name]) for name in op.inputs]
    for name, shape in zip(op.inputs, shapes, strict=True):
        found.shapes[name] = shape
    binder = _Binder(found.unifier, op)
    outputs = binder.run(signature, shapes, [() if n is None else graph.tensors[n].shape for n in op.outputs])
    found.identifiers[op.name] = binder.sizes
    made = zip(op.outputs, outputs, strict=True)
    found.shapes.update({output: shape for output, shape in made if output is not None})


class _Binder:
    """Binds the annotation of one operation to symbolic shapes."""

    def __init__(self, unifier: Unifier, op: Operation) -> None:
        self.unifier = unifier
        self.place = place_of(op)
        self.sizes: dict[str, Size] = {}

    def run(self, signature: Signature, inputs: Sequence[Shape], outputs: Sequence[tuple[int, ...]]) -> list[Shape]:
        """Return the outputs' shapes. Raises Conflict."""
        bound = signature.bound
        if bound is None:
            return [tuple(self.unifier.fresh(s, self.place) for s in shape) for shape in outputs]
        self.inputs(bound, inputs)
        loose = self.loose(bound, inputs)
        made: list[Shape] = []
        for operand, shape in zip(bound.outputs, outputs, strict=True):
            if operand is None or len(operand.dims) != len(shape):
                made.append(tuple(self.unifier.fresh(s, self.place, loose) for s in shape))
            else:
                made.append(tuple(self.made(bound, dim, loose) for dim in operand.dims))
        return made

    def inputs(self, bound: BoundAnnotation, shapes: Sequence[Shape]) -> None:
        """Find the sizes of identifiers, from dims that are one first, then from the others."""
        loose = self.loose(bound, shapes)
        left: list[tuple[BoundDim, Size]] = []
        for operand, shape in zip(bound.inputs, shapes, strict=True):
            if operand is None or len(operand.dims) != len(shape):
                continue
            for dim, size in zip(operand.dims, shape, strict=True):
                only = dim.factors[0] if len(dim.factors) == 1 else None
                if only is None:
                    left.append((dim, size))
                elif only.identifier is not None:
                    self.assign(only.identifier, size)
                elif loose is None:
                    self.unifier.equate(size, number(only.size), self.place)
        for dim, size in left:
            self.regrouped(bound, dim, size)

    def assign(self, name: str, size: Size) -> None:
        if name in self.sizes:
            self.unifier.equate(self.sizes[name], size, self.place)
        else:
            self.sizes[name] = size

    def regrouped(self, bound: BoundAnnotation, dim: BoundDim, size: Size) -> None:
        """Find the one unknown factor of a group or concatenation, or names for several."""
        size = self.unifier.known(size)
        names = [f.identifier for f in dim.factors if f.identifier is not None and f.identifier not in self.sizes]
        if size.constant is not None:
            for name in names:
                self.assign(name, number(bound.sizes[name]))
        elif len(names) == 1:
            given = [self.factor(f.identifier, f.size) for f in dim.factors if f.identifier not in names]
            rest = size - total(given) if dim.concat else size.over(product(given))
            if rest is not None:
                self.assign(names[0], rest)
                return
        for name in names:
            if name not in self.sizes:
                self.assign(name, self.unifier.fresh(bound.sizes[name], self.place))
        self.unifier.equate(self.dim(dim), size, self.place)

    def factor(self, identifier: str | None, size: int) -> Size:
        return self.sizes[identifier] if identifier is not None else number(size)

    def dim(self, dim: BoundDim) -> Size:
        """Return the size of a dim all of whose identifiers are known."""
        factors = [self.unifier.known(self.factor(f.identifier, f.size)) for f in dim.factors]
        return total(factors) if dim.concat else product(factors)

    def loose(self, bound: BoundAnnotation, shapes: Sequence[Shape]) -> Size | None:
        """Return a size that numbers in the annotation may depend on: of a dim that the operator reads whole."""
        for operand, shape in zip(bound.inputs, shapes, strict=True):
            if operand is None:
                found = next((s for s in map(self.unifier.known, shape) if s.names), None)
                if found is not None:
                    return found
                continue
            for dim, size in zip(operand.dims, shape, strict=False):
                frozen = all(f.identifier is None or bound.marks.get(f.identifier) in UNSPLIT for f in dim.factors)
                if frozen and self.unifier.known(size).names:
                    return self.unifier.known(size)
        return None

    def made(self, bound: BoundAnnotation, dim: BoundDim, loose: Size | None) -> Size:
        """Return the size of an output's dim."""
        for name in (f.identifier for f in dim.factors if f.identifier is not None):
            if name in self.sizes:
                continue
            size = bound.sizes[name]
            computed = bound.marks.get(name) in UNSPLIT and bound.inputs and loose is None  # from dims that are numbers
            self.sizes[name] = number(size) if computed else self.unifier.fresh(size, self.place, loose)
        if len(dim.factors) == 1 and dim.factors[0].identifier is None and loose is not None:
            return self.unifier.fresh(dim.factors[0].size, self.place, loose)
        return self.dim(dim)


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
