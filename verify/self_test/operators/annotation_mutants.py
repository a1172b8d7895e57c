"""Wrong annotations: every one that differs from a given one in one place, and random ones near it.

In one place (`annotation_mutants`):

mark        on one occurrence of an identifier, or on all of them: none, `+`, `+max`, `^`
identifier  replaced by another one of the annotation, with that one's mark
swapped     two dims of an operand, two factors of a group, two parts of a concatenation
dropped     a dim, factor or part
duplicated  a dim, factor or part
additive    the mark of an operand, added or removed
integer     another size

At random, up to three at once (`edited`):

mark       an identifier gets another mark everywhere: split, `+`, `+max`, frozen
place      one place changes as above
merged     two identifiers become one
exchanged  two identifiers change places in one operand
parted     an identifier gets a new name in some of the operands that have it
packed     an identifier becomes two: `a` is `(a 2)` or `(2 a)`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import (
    Annotation,
    Concat,
    Dim,
    Group,
    Identifier,
    Integer,
    Opaque,
    Operand,
    print_annotation,
)
from op_registry.annotation.well_formed import map_identifiers

from nnscaler.errors import AnnotationError

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


# -- at random --------------------------------------------------------------------------------------------------------

EDITS = (1, 1, 1, 2, 2, 3)  # how many at once


def edited(text: str, rng: random.Random) -> str:
    """Return the text after one to three random edits; it may be none of the language."""
    for _ in range(rng.choice(EDITS)):
        try:
            text = _edited(parse(text), rng)
        except AnnotationError:
            return text
    return text


def _edited(annotation: Annotation, rng: random.Random) -> str:
    names = tuple(dict.fromkeys(i.name for i in annotation.identifiers()))
    if not names:
        return print_annotation(annotation)
    kind = rng.choice(("mark", "mark", "place", "place", "merged", "exchanged", "parted", "packed"))
    if kind == "place":
        return _at_one_place(print_annotation(annotation), rng)
    return print_annotation(_KINDS[kind](annotation, names, rng))


def _at_one_place(text: str, rng: random.Random) -> str:
    by_kind: dict[str, list[str]] = {}
    for mutant in _known_mutants(text):
        by_kind.setdefault(mutant.kind, []).append(mutant.text)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))])


@lru_cache(maxsize=512)
def _known_mutants(text: str) -> tuple[AnnotationMutant, ...]:
    return annotation_mutants(text)


def _with_mark(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    name, mark = rng.choice(names), rng.choice(_MARKS)
    return _marked_everywhere(annotation, name, mark)


def _merged(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    found = {i.name: i for i in annotation.identifiers()}
    name, other = rng.choice(names), found[rng.choice(names)]
    return map_identifiers(annotation, lambda i: other if i.name == name else i)


def _exchanged(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    found = {i.name: i for i in annotation.identifiers()}
    first, second = rng.choice(names), rng.choice(names)
    exchange = {first: found[second], second: found[first]}
    return _in_operands(
        annotation, lambda i: exchange.get(i.name, i), [rng.randrange(len(tuple(annotation.operands())))]
    )


def _parted(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    name = rng.choice(names)
    having = [n for n, o in enumerate(annotation.operands()) if any(i.name == name for i in o.identifiers())]
    chosen = [n for n in having if rng.random() < 0.5]
    return _in_operands(annotation, lambda i: replace(i, name="new") if i.name == name else i, chosen)


def _packed(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    name, first, number = rng.choice(names), rng.random() < 0.5, rng.choice((2, 3))

    def packed(dim: Dim) -> Dim:
        if not isinstance(dim, Identifier) or dim.name != name:
            return dim
        return Group((dim, Integer(number)) if first else (Integer(number), dim))

    def of(operand: Operand | Opaque) -> Operand | Opaque:
        return replace(operand, dims=tuple(map(packed, operand.dims))) if isinstance(operand, Operand) else operand

    return Annotation(tuple(map(of, annotation.inputs)), tuple(map(of, annotation.outputs)))


def _in_operands(
    annotation: Annotation, change: Callable[[Identifier], Identifier], chosen: Sequence[int]
) -> Annotation:
    """Return the change made in some operands only, numbered as `Annotation.operands` gives them."""
    count = -1

    def of(operand: Operand | Opaque) -> Operand | Opaque:
        nonlocal count
        if isinstance(operand, Opaque):
            return operand
        count += 1
        if count not in chosen:
            return operand
        alone = map_identifiers(Annotation((operand,), ()), change)
        return alone.inputs[0]

    return Annotation(tuple(map(of, annotation.inputs)), tuple(map(of, annotation.outputs)))


_KINDS: Mapping[str, Callable[[Annotation, Sequence[str], random.Random], Annotation]] = {
    "mark": _with_mark,
    "merged": _merged,
    "exchanged": _exchanged,
    "parted": _parted,
    "packed": _packed,
}
