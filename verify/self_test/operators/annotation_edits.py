"""Random annotations near a true one: up to three edits of it.

mark       an identifier gets another mark everywhere: split, `+`, `+max`, frozen
place      one place changes, as in `annotation_mutants`: another identifier, dims swapped, a dim dropped or doubled
merged     two identifiers become one
exchanged  two identifiers change places in one operand
parted     an identifier gets a new name in some of the operands that have it
packed     an identifier becomes two: `a` is `(a 2)` or `(2 a)`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from op_registry.annotation.parser import parse
from op_registry.annotation.rules import map_identifiers
from op_registry.annotation.syntax import Annotation, Dim, Group, Identifier, Integer, Opaque, Operand, print_annotation

from nnscaler.errors import AnnotationError
from verify.self_test.operators.annotation_mutants import AnnotationMutant, annotation_mutants

EDITS = (1, 1, 1, 2, 2, 3)  # how many at once
_MARKS = (Identifier("", ""), Identifier("", "+"), Identifier("", "+", "max"), Identifier("", "^"))


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
    for mutant in _mutants(text):
        by_kind.setdefault(mutant.kind, []).append(mutant.text)
    return rng.choice(by_kind[rng.choice(sorted(by_kind))])


@lru_cache(maxsize=512)
def _mutants(text: str) -> tuple[AnnotationMutant, ...]:
    return annotation_mutants(text)


def _marked(annotation: Annotation, names: Sequence[str], rng: random.Random) -> Annotation:
    name, mark = rng.choice(names), rng.choice(_MARKS)
    return map_identifiers(
        annotation, lambda i: replace(i, mark=mark.mark, reduction=mark.reduction) if i.name == name else i
    )


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
    "mark": _marked,
    "merged": _merged,
    "exchanged": _exchanged,
    "parted": _parted,
    "packed": _packed,
}
