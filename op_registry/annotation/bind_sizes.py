"""Bind an annotation to the shapes of one call: every identifier gets its size.

Sizes come from `sizes`, from dims that are one identifier, then from groups and concatenations with one unknown.
`*` becomes identifiers `*0`, `*1`, ..., one per dim, the same wherever it stands. A literal stays a literal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from op_registry.annotation.explain_mismatch import Mismatch, misfit
from op_registry.annotation.syntax_tree import (
    Annotation,
    Concat,
    Dim,
    Group,
    Identifier,
    Integer,
    Mark,
    Opaque,
    Operand,
    Reduction,
    print_annotation,
)
from op_registry.annotation.well_formed import check, parse_checked, tied_identifiers

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dim. Without identifier it is a literal, never split, which counts in the outer of what follows."""

    identifier: str | None
    size: int


@dataclass(frozen=True, slots=True)
class BoundDim:
    """A dim with sizes.

    factors   outermost first
    concat    whether the dim's size is the sum of the factors, not their product
    """

    factors: tuple[Factor, ...]
    concat: bool = False

    @property
    def size(self) -> int:
        """Elements along the dim."""
        sizes = [f.size for f in self.factors]
        return sum(sizes) if self.concat else prod(sizes)

    def size_with(self, sizes: Mapping[str, Any]) -> Any:
        """Return the size where identifiers have these sizes, which may be symbols."""
        found = [f.size if f.identifier is None else sizes[f.identifier] for f in self.factors]
        return sum(found) if self.concat else prod(found)


@dataclass(frozen=True, slots=True)
class BoundOperand:
    """An operand with sizes.

    dims       outermost first; (): a scalar
    additive   whether it is added once to sums whose parts lie on several ranks: `+n`
    """

    dims: tuple[BoundDim, ...]
    additive: bool = False

    @property
    def shape(self) -> Shape:
        """Sizes of the dims, as torch has them."""
        return tuple(d.size for d in self.dims)

    def shape_with(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the shape where identifiers have these sizes, which may be symbols."""
        return tuple(d.size_with(sizes) for d in self.dims)

    def identifiers(self) -> tuple[str, ...]:
        """Return every identifier of the operand, left to right."""
        return tuple(f.identifier for d in self.dims for f in d.factors if f.identifier is not None)


@dataclass(frozen=True, slots=True)
class BoundAnnotation:
    """An annotation with the sizes of one call.

    text         of the annotation
    inputs       one per tensor of the call; None is `?`, replicated only
    outputs      one per output; None is `?`, or an output without a shape whose sizes nothing else determines
    sizes        by identifier (`*` expanded)
    marks        by identifier (`*` expanded)
    reductions   by identifier marked `+`
    tied         by identifier, those that are split together: the members of one `[q k v]`, usually just itself
    rows         by identifier marked `<`, the one along whose rows it is read up to a row: mostly another one
    """

    text: str
    inputs: tuple[BoundOperand | None, ...]
    outputs: tuple[BoundOperand | None, ...]
    sizes: Mapping[str, int]
    marks: Mapping[str, Mark]
    reductions: Mapping[str, Reduction]
    tied: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, str] = field(default_factory=dict)


def bind(
    annotation: Annotation | str,
    input_shapes: Sequence[Sequence[int] | None],
    output_shapes: Sequence[Sequence[int] | None] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> BoundAnnotation:
    """Give every identifier its size.

    One entry of `input_shapes` per operand; None stands for an argument that is not a tensor (or an absent one), and
    has no entry in the result. `output_shapes` None: outputs are computed from the inputs. `sizes` fixes sizes that
    shapes alone do not determine. Raises `AnnotationError`, code `annotation_does_not_fit` when shapes and annotation
    disagree.
    """
    if isinstance(annotation, str):
        text = annotation
    else:
        text = print_annotation(annotation)
        check(annotation, text)
    shapes_in = tuple(None if s is None else tuple(s) for s in input_shapes)
    shapes_out = None if output_shapes is None else tuple(None if s is None else tuple(s) for s in output_shapes)
    return _bind(text, shapes_in, shapes_out, tuple(sizes.items()) if sizes else ())


@lru_cache(maxsize=65536)
def _bind(
    text: str,
    input_shapes: tuple[Shape | None, ...],
    output_shapes: tuple[Shape | None, ...] | None,
    sizes: tuple[tuple[str, int], ...],
) -> BoundAnnotation:
    annotation = parse_checked(text)
    try:
        return _Binder(text, annotation, input_shapes, output_shapes, dict(sizes)).bind()
    except Mismatch as mismatch:
        raise misfit(mismatch, text, annotation, input_shapes, output_shapes, dict(sizes)) from None


class _Binder:
    """One run of the unification; `sizes` grows until nothing more can be inferred."""

    def __init__(
        self,
        text: str,
        annotation: Annotation,
        input_shapes: tuple[Shape | None, ...],
        output_shapes: tuple[Shape | None, ...] | None,
        sizes: dict[str, int],
    ) -> None:
        self.text = text
        self.annotation = annotation
        self.input_shapes = input_shapes
        self.output_shapes = output_shapes
        self.sizes = sizes
        self.wildcard: int | None = None  # the number of dims of `*`
        self.source = dict.fromkeys(sizes, "given")

    def bind(self) -> BoundAnnotation:
        a = self.annotation
        if len(self.input_shapes) != len(a.inputs):
            raise Mismatch(_counts(len(a.inputs), "input", len(self.input_shapes)), {})
        if self.output_shapes is None:
            self.output_shapes = (None,) * len(a.outputs)
        if len(self.output_shapes) != len(a.outputs):
            raise Mismatch(_counts(len(a.outputs), "output", len(self.output_shapes)), {})
        self.unify()
        inputs = tuple(
            None if isinstance(operand, Opaque) else self.bound(operand, shape, f"input {i}")
            for i, (operand, shape) in enumerate(zip(a.inputs, self.input_shapes, strict=True))
            if shape is not None
        )
        outputs = tuple(
            None if isinstance(operand, Opaque) else self.bound(operand, shape, f"output {i}")
            for i, (operand, shape) in enumerate(zip(a.outputs, self.output_shapes, strict=True))
        )
        marks, reductions, tied = _properties(a, self.wildcard or 0)
        rows = {i.name: i.rows or i.name for i in a.identifiers() if i.mark == "<"}
        present = {n for o in (*inputs, *outputs) if o is not None for n in o.identifiers()}
        return BoundAnnotation(
            self.text,
            inputs,
            outputs,
            {n: s for n, s in self.sizes.items() if n in present},
            {n: m for n, m in marks.items() if n in present},
            {n: r for n, r in reductions.items() if n in present},
            {n: t for n, t in tied.items() if n in present},
            {n: r for n, r in rows.items() if n in present},
        )

    def unify(self) -> None:
        pending: list[tuple[Dim, int, str]] = []
        assert self.output_shapes is not None
        arguments = zip(self.annotation.inputs, self.input_shapes, strict=True)
        places = [(o, s, f"input {i}") for i, (o, s) in enumerate(arguments)]
        results = zip(self.annotation.outputs, self.output_shapes, strict=True)
        places += [(o, s, f"output {i}") for i, (o, s) in enumerate(results)]
        for operand, shape, place in places:
            if isinstance(operand, Operand) and shape is not None:
                for number, (dim, size) in enumerate(self.aligned(operand, shape, place)):
                    if isinstance(dim, Identifier):
                        self.assign(dim.name, size, dim, (place, number))
                    elif isinstance(dim, Integer):
                        if dim.size != size:
                            message = f"dim {number} of {place} is {size}, the annotation says {dim.size}"
                            raise Mismatch(message, self.sizes, dim)
                    else:
                        pending.append((dim, size, f"{place}, dim {number}"))
        while pending:
            left = [p for p in pending if not self.solve(*p)]
            if len(left) == len(pending):
                raise self.undetermined(left[0])
            pending = left

    def aligned(self, operand: Operand, shape: Shape, place: str) -> Iterable[tuple[Dim, int]]:
        """Pair the operand's dims with sizes; `*` becomes one identifier per dim."""
        dims = operand.dims
        star = next((i for i, d in enumerate(dims) if isinstance(d, Identifier) and d.name == "*"), None)
        if star is None:
            if len(dims) != len(shape):
                if not shape and dims == _ONE:  # nnScaler writes a scalar as 1
                    return ()
                message = f"{place} has {_dims(len(shape))}, its operand {len(dims)}"
                raise Mismatch(message, self.sizes, operand)
            return zip(dims, shape, strict=True)
        count = len(shape) - len(dims) + 1
        if self.wildcard is None and count >= 0:
            self.wildcard = count
        if count != self.wildcard:
            if count < 0:
                message = f"{place} has {_dims(len(shape))}, its operand at least {len(dims) - 1}"
            else:
                message = f"`*` is {_dims(count)} in {place} and {_dims(self.wildcard or 0)} before"
            raise Mismatch(message, self.sizes, operand)
        return zip(_expand(dims, star, count), shape, strict=True)

    def assign(self, name: str, size: int, dim: Dim, source: object) -> None:
        known = self.sizes.get(name)
        if known is None:
            self.sizes[name] = size
            self.source[name] = source  # type: ignore[assignment]
        elif known != size:
            message = f"`{name}` is {known} ({_place(self.source[name])}) and {size} ({_place(source)})"
            raise Mismatch(message, self.sizes, dim)

    def solve(self, dim: Dim, size: int, place: str) -> bool:
        """Check a group or concatenation whose parts are known, or infer its one unknown; False if it must wait."""
        concat = isinstance(dim, Concat)
        parts = dim.parts if isinstance(dim, Concat) else dim.factors if isinstance(dim, Group) else ()
        known = [p.size if isinstance(p, Integer) else self.sizes.get(p.name) for p in parts]
        unknown = [p for p, s in zip(parts, known, strict=True) if s is None and isinstance(p, Identifier)]
        numbers = [s for s in known if s is not None]
        total = sum(numbers) if concat else prod(numbers)
        shown = f" {'+' if concat else 'x'} ".join("?" if s is None else str(s) for s in known)
        if not unknown:
            if total != size:
                raise Mismatch(f"{place} is {size}, not {shown} = {total}", self.sizes, dim)
            return True
        if len(unknown) > 1 or (not concat and total == 0):
            return False
        if concat:
            if total > size:
                raise Mismatch(f"{place} is {size}, less than {shown}", self.sizes, dim)
            self.assign(unknown[0].name, size - total, dim, place)
            return True
        if size % total:
            raise Mismatch(f"{place} is {size}, which {total} does not divide ({shown})", self.sizes, dim)
        self.assign(unknown[0].name, size // total, dim, place)
        return True

    def undetermined(self, pending: tuple[Dim, int, str]) -> Mismatch:
        dim, size, place = pending
        names = [i.name for i in Operand((dim,)).identifiers() if i.name not in self.sizes]
        shown = " and ".join(f"`{n}`" for n in names)
        message = f"{place} is {size}, which does not determine {shown}"
        kind = "concatenation" if isinstance(dim, Concat) else "group"
        hint = f"at most one size of a {kind} is inferred; an argument named `{names[0]}` gives its size"
        return Mismatch(message, self.sizes, dim, hint)

    def bound(self, operand: Operand, shape: Shape | None, place: str) -> BoundOperand | None:
        """Return the operand with sizes; None when it has no shape and some size is unknown."""
        dims: list[BoundDim] = []
        if shape == () and operand.dims == _ONE:
            return BoundOperand((), operand.additive)
        for dim in operand.dims:
            if isinstance(dim, Identifier) and dim.name == "*":
                if self.wildcard is None:
                    return None
                names = [f"*{i}" for i in range(self.wildcard)]
                dims.extend(BoundDim((Factor(n, self.sizes[n]),)) for n in names)
                continue
            factors: list[Factor] = []
            for part in _parts(dim):
                if isinstance(part, Integer):
                    factors.append(Factor(None, part.size))
                elif part.name in self.sizes:
                    factors.append(Factor(part.name, self.sizes[part.name]))
                else:
                    assert shape is None, (place, part)
                    return None
            dims.append(BoundDim(tuple(factors), isinstance(dim, Concat) and len(factors) > 1))
        return BoundOperand(tuple(dims), operand.additive)


_ONE = (Integer(1),)


def _counts(operands: int, side: str, found: int) -> str:
    return f"{operands} {side} operand{'s' * (operands != 1)}, but {found} {side}{'s' * (found != 1)}"


def _dims(count: int) -> str:
    return f"{count} dim{'s' * (count != 1)}"


def _place(source: object) -> str:
    return f"{source[0]}, dim {source[1]}" if isinstance(source, tuple) else str(source)


def _parts(dim: Dim) -> tuple[Identifier | Integer, ...]:
    if isinstance(dim, Group):
        return dim.factors
    if isinstance(dim, Concat):
        return dim.parts
    return (dim,)


@lru_cache(maxsize=4096)
def _expand(dims: tuple[Dim, ...], star: int, count: int) -> tuple[Dim, ...]:
    wildcard = dims[star]
    assert isinstance(wildcard, Identifier)
    names = [Identifier(f"*{i}", wildcard.mark, wildcard.reduction, wildcard.start, wildcard.end) for i in range(count)]
    return (*dims[:star], *names, *dims[star + 1 :])


@lru_cache(maxsize=16384)
def _properties(
    annotation: Annotation, wildcard: int
) -> tuple[Mapping[str, Mark], Mapping[str, Reduction], Mapping[str, tuple[str, ...]]]:
    marks: dict[str, Mark] = {}
    reductions: dict[str, Reduction] = {}
    ties = tied_identifiers(annotation)
    tied: dict[str, tuple[str, ...]] = {}
    for identifier in annotation.identifiers():
        names = [f"*{i}" for i in range(wildcard)] if identifier.is_wildcard else [identifier.name]
        for name in names:
            marks[name] = identifier.mark
            tied[name] = (name,) if identifier.is_wildcard else ties[identifier.name]
            if identifier.mark == "+":
                reductions[name] = identifier.reduction
    return marks, reductions, tied
