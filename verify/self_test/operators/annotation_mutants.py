"""Every annotation that differs from a given one in one place.

mark        on one occurrence of an identifier, or on all of them: none, `+`, `+max`, `^`
identifier  replaced by another one of the annotation, with that one's mark
swapped     two dims of an operand, two factors of a group, two parts of a concatenation
dropped     a dim, factor or part
duplicated  a dim, factor or part
additive    the mark of an operand, added or removed
integer     another size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from op_registry.annotation.parser import parse
from op_registry.annotation.rules import map_identifiers
from op_registry.annotation.syntax import Annotation, Concat, Dim, Group, Identifier, Integer, Operand, print_annotation

Row = tuple[Dim, ...]  # the dims of an operand, the factors of a group, the parts of a concatenation
_MARKS = (Identifier("", ""), Identifier("", "+"), Identifier("", "+", "max"), Identifier("", "^"))


@dataclass(frozen=True, slots=True)
class AnnotationMutant:
    """`kind`: one of those above. The text may be none of the language."""

    text: str
    kind: str


def annotation_mutants(text: str) -> tuple[AnnotationMutant, ...]:
    """Return every mutant of an annotation once, in the order of the text. Raises AnnotationError."""
    annotation = parse(text)
    seen = {print_annotation(annotation)}
    found: list[AnnotationMutant] = []
    for kind, mutant in _mutants(annotation):
        printed = print_annotation(mutant)
        if printed not in seen:
            seen.add(printed)
            found.append(AnnotationMutant(printed, kind))
    return tuple(found)


def _mutants(annotation: Annotation) -> Iterator[tuple[str, Annotation]]:
    names = {i.name: i for i in annotation.identifiers()}
    for row, rebuild in _rows(annotation):
        for kind, changed in _row_mutants(row, tuple(names.values())):
            yield kind, rebuild(changed)
    for operand, rebuild_operand in _operands(annotation):
        yield "additive", rebuild_operand(replace(operand, additive=not operand.additive))
    for name in names:
        for mark in _MARKS:
            yield "mark", _marked_everywhere(annotation, name, mark)


def _row_mutants(row: Row, names: tuple[Identifier, ...]) -> Iterator[tuple[str, Row]]:
    for i, dim in enumerate(row):
        before, after = row[:i], row[i + 1 :]
        if isinstance(dim, Identifier):
            for mark in _MARKS:
                yield "mark", (*before, _marked(dim, mark), *after)
            for other in names:
                yield "identifier", (*before, other, *after)
        elif isinstance(dim, Integer):
            for size in (dim.size + 1, dim.size - 1, 2 * dim.size):
                if size > 0:
                    yield "integer", (*before, Integer(size), *after)
        yield "dropped", (*before, *after)
        yield "duplicated", (*before, dim, dim, *after)
    for i, j in combinations(range(len(row)), 2):
        changed = list(row)
        changed[i], changed[j] = changed[j], changed[i]
        yield "swapped", tuple(changed)


def _marked(identifier: Identifier, mark: Identifier) -> Identifier:
    return replace(identifier, mark=mark.mark, reduction=mark.reduction)


def _marked_everywhere(annotation: Annotation, name: str, mark: Identifier) -> Annotation:
    return map_identifiers(annotation, lambda i: _marked(i, mark) if i.name == name else i)


def _operands(annotation: Annotation) -> Iterator[tuple[Operand, Callable[[Operand], Annotation]]]:
    """Yield every operand that is a tensor, and how to put another one in its place."""
    for side in ("inputs", "outputs"):
        operands = annotation.inputs if side == "inputs" else annotation.outputs
        for number, operand in enumerate(operands):
            if isinstance(operand, Operand):

                def rebuild(other: Operand, side: str = side, number: int = number) -> Annotation:
                    changed = list(getattr(annotation, side))
                    changed[number] = other
                    return replace(annotation, **{side: tuple(changed)})

                yield operand, rebuild


def _rows(annotation: Annotation) -> Iterator[tuple[Row, Callable[[Row], Annotation]]]:
    """Yield every row of dims, factors and parts, and how to put another one in its place. An emptied one goes."""
    for operand, rebuild_operand in _operands(annotation):

        def rebuild(
            row: Row, operand: Operand = operand, outer: Callable[[Operand], Annotation] = rebuild_operand
        ) -> Annotation:
            return outer(replace(operand, dims=row))

        yield operand.dims, rebuild
        for i, dim in enumerate(operand.dims):
            if isinstance(dim, Group | Concat):

                def inside(
                    row: Row, dims: Row = operand.dims, i: int = i, whole: Callable[[Row], Annotation] = rebuild
                ) -> Annotation:
                    made: Row = (_of(dims[i], row),) if row else ()
                    return whole((*dims[:i], *made, *dims[i + 1 :]))

                yield (dim.factors if isinstance(dim, Group) else dim.parts), inside


def _of(dim: Dim, row: Row) -> Dim:
    if isinstance(dim, Concat):
        return Concat(tuple(p for p in row if isinstance(p, Identifier)))
    return Group(tuple(f for f in row if isinstance(f, Identifier | Integer)))
