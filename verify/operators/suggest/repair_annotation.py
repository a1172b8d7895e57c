"""Suggest corrections of an annotation: marks that hold for an identifier, and identifiers frozen without need.

Candidates are tried from the most to the least useful, by the ordinary oracle; only what passed is suggested. Freezing
an identifier (`^`) is always true, and is the last resort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import (
    Annotation,
    Dim,
    Group,
    Identifier,
    Opaque,
    Operand,
    print_annotation,
    print_dim,
    print_operand,
)
from op_registry.annotation.well_formed import marked, tied_identifiers, with_marks
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from verify.evidence.verify_op_options import OpOptions
from verify.operators.suggest.ask_oracle import claims_hold, report_on, with_annotation

SUM, MAX, SPATIAL, FROZEN = Identifier("", "+"), Identifier("", "+", "max"), Identifier(""), Identifier("", "^")
MOST_FACTORS = 3  # of a group whose order is tried


@dataclass(frozen=True, slots=True)
class Advice:
    """An annotation, why in one sentence, and whether it freezes (which needs no test) or passed one."""

    text: str
    sentence: str
    freezes: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`names`: the identifiers that must hold under it."""

    annotation: Annotation
    names: tuple[str, ...]
    sentence: str


def repair(spec: OperatorSpec, identifier: str, options: OpOptions | None = None) -> Advice | None:
    """Find an annotation that holds in place of one whose claim on `identifier` was refuted; None for a function."""
    if not isinstance(spec.annotation, str):
        return None
    annotation = parse(spec.annotation)
    name = plain_name(identifier)
    for candidate in (*_marked(annotation, name), *_reordered(annotation, name)):
        if print_annotation(candidate.annotation) != print_annotation(annotation) and _passes(spec, candidate, options):
            return Advice(print_annotation(candidate.annotation), candidate.sentence)
    sentence = f"`{name}` cannot be split: its shards' outputs neither make up the right answer nor sum to it"
    return Advice(frozen(spec.annotation, name), sentence, freezes=True)


def widen(spec: OperatorSpec, options: OpOptions | None = None) -> list[Advice]:
    """Find identifiers that are frozen and need not be.

    Each text has what the ones before it have; each was tested, the last one as a whole.
    """
    found: list[Advice] = []
    if not isinstance(spec.annotation, str):
        return found
    annotation = parse(spec.annotation)
    for name in dict.fromkeys(i.name for i in annotation.identifiers() if i.mark == "^"):
        for candidate in _marked(annotation, name):
            if _passes(spec, candidate, options):
                annotation = candidate.annotation
                mark = with_marks_of(annotation, name)
                sentence = f"`{name}^` can be split, as `{mark}`: {candidate.sentence.partition(': ')[2]}"
                found.append(Advice(print_annotation(annotation), sentence))
                break
    if len(found) > 1 and not report_on(with_annotation(spec, found[-1].text), options).verdict.passes:
        return found[:1]  # together they do not hold: the first one alone does
    return found


def frozen(text: str, name: str) -> str:
    """Return the text with an identifier frozen, and those that are split together with it."""
    annotation = parse(text)
    return with_marks(_without_additives(annotation, name), _together(annotation, name), FROZEN)


def without_slices(spec: OperatorSpec, identifier: str) -> Advice | None:
    """Freeze what is read up to a row of an identifier, since its slices in time were refuted; None for a function."""
    if not isinstance(spec.annotation, str):
        return None
    annotation = parse(spec.annotation)
    names = {i.name for i in annotation.identifiers() if i.mark == "<" and (i.rows or i.name) == identifier}
    sentence = f"then `{identifier}` is cut into no slices in time"
    return Advice(with_marks(annotation, names, FROZEN), sentence, freezes=True)


def plain_name(identifier: str) -> str:
    """Return an identifier as the annotation writes it: `*` for `*0`."""
    return "*" if identifier.startswith("*") else identifier


def with_marks_of(annotation: Annotation, name: str) -> str:
    """Return an identifier with its mark."""
    return next(print_dim(i) for i in annotation.identifiers() if i.name == name)


def _passes(spec: OperatorSpec, candidate: _Candidate, options: OpOptions | None) -> bool:
    try:
        changed = with_annotation(spec, print_annotation(candidate.annotation))
    except AnnotationError:
        return False
    return claims_hold(changed, candidate.names, options)


def _together(annotation: Annotation, name: str) -> tuple[str, ...]:
    return tied_identifiers(annotation).get(name, (name,))


def _marked(annotation: Annotation, name: str) -> Iterator[_Candidate]:
    """Yield other marks for an identifier, and other choices of operands that enter additively, the likeliest first."""
    bare = _without_additives(annotation, name)
    names = _together(annotation, name)

    before = with_marks_of(annotation, name)

    def candidate(of: Annotation, like: Identifier, reason: str) -> _Candidate:
        changed = marked(of, names, like)
        after = with_marks_of(changed, name)
        change = f"under a split of `{after}`" if after == before else f"`{before}` should be `{after}`"
        return _Candidate(changed, names, f"{change}: {reason}")

    yield candidate(bare, SPATIAL, "each shard computes its own part of the output")
    yield candidate(bare, SUM, "the outputs of the shards sum to the right answer")
    lacking = [i for i, o in enumerate(bare.inputs) if isinstance(o, Operand) and not _has(o, names)]
    for chosen in _choices(lacking):
        operands = " and ".join(f"`+{print_operand(bare.inputs[i])}`" for i in chosen)
        reason = (
            "the outputs of the shards sum to the right answer if what is added enters as a partial sum too,"
            f" {operands}; whole on every shard, it would be added once per shard"
        )
        yield candidate(_additive(bare, chosen), SUM, reason)
    yield candidate(bare, MAX, "the largest of the shards' outputs is the right answer")


def _choices(lacking: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield operands to mark as additive: one, two, all."""
    yield from combinations(lacking, 1)
    yield from combinations(lacking[:5], 2)
    if len(lacking) > 2:
        yield tuple(lacking)


def _reordered(annotation: Annotation, name: str) -> Iterator[_Candidate]:
    """Yield groups with the identifier in another order: with all their factors as they are marked, then with the
    others frozen."""
    for others in (False, True):
        for candidate in _orders(annotation, name):
            rest = [n for n in candidate.names if n != name]
            if not others:
                yield candidate
            elif rest:
                yield replace(candidate, annotation=marked(candidate.annotation, rest, FROZEN), names=(name,))


def _orders(annotation: Annotation, name: str) -> Iterator[_Candidate]:
    """Yield groups with the identifier in another order: in all places, then in one place each."""
    groups = [d for d in _dims(annotation) if isinstance(d, Group) and _in(d, name)]
    factors = {print_dim(g): g for g in groups if 1 < len(g.factors) <= MOST_FACTORS}
    for text, group in factors.items():
        names = tuple(f.name for f in group.factors if isinstance(f, Identifier) and f.mark != "^")
        for order in permutations(group.factors):
            if order == group.factors:
                continue
            other = replace(group, factors=order)
            sentence = f"the dim is packed as `{print_dim(other)}`, not as `{text}`"
            yield _Candidate(_with_group(annotation, group, other, None), names, sentence)
            for place in range(len([g for g in groups if print_dim(g) == text])):
                yield _Candidate(_with_group(annotation, group, other, place), names, sentence)


def _dims(annotation: Annotation) -> Iterator[Dim]:
    for operand in annotation.operands():
        yield from operand.dims


def _in(group: Group, name: str) -> bool:
    return any(isinstance(f, Identifier) and f.name == name for f in group.factors)


def _with_group(annotation: Annotation, group: Group, other: Group, place: int | None) -> Annotation:
    """Return the annotation with `other` for `group`, everywhere or at one place of all."""
    count = -1

    def on_operand(operand: Operand | Opaque) -> Operand | Opaque:
        nonlocal count
        if isinstance(operand, Opaque):
            return operand
        dims: list[Dim] = []
        for dim in operand.dims:
            count += dim == group
            dims.append(other if dim == group and place in (None, count) else dim)
        return replace(operand, dims=tuple(dims))

    return Annotation(tuple(map(on_operand, annotation.inputs)), tuple(map(on_operand, annotation.outputs)))


def _has(operand: Operand, names: Iterable[str]) -> bool:
    return any(i.name in names for i in operand.identifiers())


def _additive(annotation: Annotation, positions: Sequence[int]) -> Annotation:
    inputs = tuple(
        replace(o, additive=True) if i in positions and isinstance(o, Operand) else o
        for i, o in enumerate(annotation.inputs)
    )
    return replace(annotation, inputs=inputs)


def _without_additives(annotation: Annotation, name: str) -> Annotation:
    """Take additive marks that belong to `name` away: those of operands that lack no other reduction identifier."""
    reductions = {i.name for i in annotation.identifiers() if i.mark == "+" and i.name != name}

    def plain(operand: Operand | Opaque) -> Operand | Opaque:
        if isinstance(operand, Opaque) or not operand.additive:
            return operand
        has = {i.name for i in operand.identifiers()}
        return operand if reductions - has else replace(operand, additive=False)

    return replace(annotation, inputs=tuple(plain(o) for o in annotation.inputs))
