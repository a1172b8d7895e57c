"""Symbolic sizes of every tensor of a graph, by the bound annotations of its operations.

A dim of a single identifier has the identifier's size, a group's is a product, a concatenation's a sum. A number that
stands for itself in the annotation, and the size of an identifier that only an output has, are numbers of the program
(`arange(16)`, the sizes of a `view`): they are taken for a symbol where the equations say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from op_registry.annotation.sizes import BoundAnnotation, BoundDim

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.signature import Signature
from verify.programs.lemmas.symbols import Size, number, product, total
from verify.programs.lemmas.unify import Unifier

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
                frozen = all(f.identifier is None or bound.marks.get(f.identifier) == "^" for f in dim.factors)
                if frozen and self.unifier.known(size).names:
                    return self.unifier.known(size)
        return None

    def made(self, bound: BoundAnnotation, dim: BoundDim, loose: Size | None) -> Size:
        """Return the size of an output's dim."""
        for name in (f.identifier for f in dim.factors if f.identifier is not None):
            if name in self.sizes:
                continue
            size = bound.sizes[name]
            computed = bound.marks.get(name) == "^" and bound.inputs and loose is None  # from dims that are numbers
            self.sizes[name] = number(size) if computed else self.unifier.fresh(size, self.place, loose)
        if len(dim.factors) == 1 and dim.factors[0].identifier is None and loose is not None:
            return self.unifier.fresh(dim.factors[0].size, self.place, loose)
        return self.dim(dim)
