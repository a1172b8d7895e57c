"""Logical tensors as terms: what the plain model computes, in one form, and each different one once (hash-consing).

A term is an operator applied to terms, with the parameters of the call and the shape of its result. A value is a number
times a term. Both graphs, the model's and a rank's, are brought to this form, so that what differs in form alone is
equal: the order of sums, where a factor is applied, chains of views and of permutations, a mean as a sum and a count,
`addmm` as a product and a sum.

    mean(x, -1) over 64 entries    1/64 * sum(x, [-1])
    addmm(b, x, w)                 sum{1 * b, 1 * mm(x, w)}
    (a + b) + c, a + (c + b)       sum{1 * a, 1 * b, 1 * c}
    full([2, 3], 0.5)              1/2 * ONE
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import Any

from op_registry.call import map_leaves

Shape = tuple[int, ...]
Coefficient = Fraction
UNIT = Fraction(1)


@dataclass(frozen=True, slots=True)
class Term:
    """
    operator  canonical name; "input", "one", "zero", "sum", "view" and "permute" have a meaning of their own
    operands  (coefficient, term) of each tensor that it reads; of a sum, its parts
    details   of an input, its name; of a call, parameters and the number of the output; of `permute`, the order
    shape     of the whole tensor; of "one" and "zero", which have every shape, ()
    dtype     as text
    """

    operator: str
    operands: tuple[tuple[Coefficient, int], ...]
    details: tuple[Any, ...]
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class WholeTerm:
    """A whole tensor: a number times a term."""

    coefficient: Coefficient
    term: int


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call of the model: its parameters, the shapes of its operands, and its outputs (None: no tensor)."""

    parameters: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    outputs: tuple[int | None, ...]


class Terms:
    """The table of terms. It grows, and what stands in it never changes."""

    def __init__(self) -> None:
        self.rows: list[Term] = []
        self._numbers: dict[Term, int] = {}
        self._calls: dict[Any, list[KnownCall]] = {}
        self.one = self.add(Term("one", (), (), (), ""))
        self.zero = self.add(Term("zero", (), (), (), ""))

    def add(self, term: Term) -> int:
        """Return the number of a term, which is the same for equal ones."""
        found = self._numbers.get(term)
        if found is None:
            found = self._numbers[term] = len(self.rows)
            self.rows.append(term)
        return found

    def __getitem__(self, number: int) -> Term:
        return self.rows[number]

    def input(self, name: str, shape: Shape, dtype: str) -> int:
        """Return the term of a tensor that is there before the step."""
        return self.add(Term("input", (), (name,), shape, dtype))

    def constant(self, value: float) -> WholeTerm:
        """Return the tensor that has this number everywhere, in any shape."""
        return WholeTerm(UNIT, self.zero) if value == 0 else WholeTerm(exact(value), self.one)

    def is_constant(self, term: int) -> bool:
        """Return whether the term has one number everywhere, and no shape of its own."""
        return term in (self.one, self.zero)

    def calls_of(self, operator: str) -> list[tuple[tuple[tuple[Coefficient, int], ...], KnownCall]]:
        """Return the operands and the calls of an operator that were made so far."""
        return [(operands, k) for (name, operands), calls in self._calls.items() if name == operator for k in calls]

    def known(self, operator: str, operands: tuple[tuple[Coefficient, int], ...]) -> list[KnownCall]:
        """Return the calls of this operator on these operands that were made so far."""
        return self._calls.get((operator, operands), [])

    def call(
        self,
        operator: str,
        operands: tuple[tuple[Coefficient, int], ...],
        parameters: Mapping[str, Any],
        shapes: tuple[Shape, ...],
        outputs: Iterable[tuple[Shape, str] | None],
    ) -> tuple[int | None, ...]:
        """Return the terms of the outputs of a call (None: no tensor). `shapes`: of the operands."""
        fixed = tuple(sorted((name, frozen(value)) for name, value in parameters.items()))
        of_constants = tuple(s for s, (_, t) in zip(shapes, operands, strict=True) if self.is_constant(t))
        made = tuple(
            None if out is None else self.add(Term(operator, operands, (fixed, of_constants, i), *out))
            for i, out in enumerate(outputs)
        )
        known = self._calls.setdefault((operator, operands), [])
        if not any(k.outputs == made for k in known):
            known.append(KnownCall(parameters, shapes, made))
        return made

    def view(self, term: int, shape: Shape) -> WholeTerm:
        """Return the term under other dims. A view of a sum is the sum of its parts' views."""
        if self.is_constant(term):
            return WholeTerm(UNIT, term)
        row = self.rows[term]
        if row.operator == "sum":
            parts = [self._part_of_view(factor, part, row.shape, shape) for factor, part in row.operands]
            if all(part is not None for part in parts):
                return self.sum([part for part in parts if part is not None], shape, row.dtype)
        base = row.operands[0][1] if row.operator == "view" else term
        if self.rows[base].shape == shape:
            return WholeTerm(UNIT, base)
        return WholeTerm(UNIT, self.add(Term("view", ((UNIT, base),), (), shape, row.dtype)))

    def _part_of_view(self, factor: Coefficient, part: int, before: Shape, after: Shape) -> WholeTerm | None:
        """Return a part of a sum that is viewed; None if it broadcasts over dims that change."""
        own = self.shape(part)
        if own is None or (len(own) < len(before) and own == before[len(before) - len(own) :] == after[-len(own) :]):
            return WholeTerm(factor, part)
        if own != before:
            return None
        viewed = self.view(part, after)
        return WholeTerm(factor * viewed.coefficient, viewed.term)

    def permute(self, term: int, order: tuple[int, ...]) -> int:
        """Return the term with its dims in this order."""
        if self.is_constant(term):
            return term
        row = self.rows[term]
        base = term
        if row.operator == "permute":
            base, order = row.operands[0][1], tuple(row.details[0][d] for d in order)
        if order == tuple(range(len(order))):
            return base
        shape = tuple(self.rows[base].shape[d] for d in order)
        return self.add(Term("permute", ((UNIT, base),), (order,), shape, row.dtype))

    def sum(self, parts: Iterable[WholeTerm], shape: Shape, dtype: str) -> WholeTerm:
        """Return the sum, which broadcasts to `shape`: parts of parts together, like terms added, the first with
        coefficient 1."""
        found: dict[int, Coefficient] = {}
        for part in parts:
            row = self.rows[part.term]
            inner = row.operands if row.operator == "sum" else ((UNIT, part.term),)
            for factor, term in inner:
                found[term] = found.get(term, Fraction(0)) + factor * part.coefficient
        left = sorted((term, factor) for term, factor in found.items() if factor and term != self.zero)
        if not left:
            return WholeTerm(UNIT, self.zero)
        first = left[0][1]
        if len(left) == 1 and (self.is_constant(left[0][0]) or self.rows[left[0][0]].shape == shape):
            return WholeTerm(first, left[0][0])
        entries = tuple((factor / first, term) for term, factor in left)
        return WholeTerm(first, self.add(Term("sum", entries, (), shape, dtype)))

    def shape(self, term: int) -> Shape | None:
        """Return the shape of a term; None for constants."""
        return None if self.is_constant(term) else self.rows[term].shape

    def describe(self, term: int, depth: int = 2) -> str:
        """Return a short text for people."""
        row = self.rows[term]
        if row.operator == "input":
            return f"`{str(row.details[0]).removeprefix('stored ')}`"
        if not row.operands or depth == 0:
            return row.operator.removeprefix("aten.").partition(".")[0]
        inner = [self.describe(t, depth - 1) for _, t in row.operands[:3]] + ["..."] * (len(row.operands) > 3)
        return f"{row.operator.removeprefix('aten.').partition('.')[0]}({', '.join(inner)})"


def frozen(value: Any) -> Any:
    """Return a parameter as something that can be a key; floats and integers apart."""

    def kept(leaf: Any) -> Any:
        return (type(leaf).__name__, leaf) if isinstance(leaf, bool | int | float) else str(leaf)

    return map_leaves(value, kept, tuple)


def exact(value: float) -> Coefficient:
    """Return the number as a fraction. Raises ValueError if it is not finite."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{value} is no coefficient")
    return Fraction(value)


def close(a: Coefficient, b: Coefficient) -> bool:
    """Return whether two coefficients are one number, up to the rounding of a few floating-point factors."""
    return a == b or abs(a - b) <= abs(b) * Fraction(1, 2**50)
