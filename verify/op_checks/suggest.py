"""What the annotation should have been: the marks that hold for an identifier whose mark does not.

Candidates are tried from the most to the least useful, and only what was tested is suggested. Freezing an identifier
(`^`) is always true, and is the last resort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from op_registry.annotation.parser import parse
from op_registry.annotation.rules import parse_checked, with_marks
from op_registry.annotation.syntax import Annotation, Identifier, Opaque, Operand
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.op_checks.identifier import Source, Unusable, run_choices, splits_of


def suggest(source: Source, identifier: str) -> str | None:
    """An annotation under which splitting `identifier` works, tested; None if the annotation is not a text."""
    text = source.spec.annotation
    if not isinstance(text, str):
        return None
    name = "*" if identifier.startswith("*") else identifier
    for candidate in _candidates(parse(text), name):
        try:
            parse_checked(candidate)
        except NnscalerError:
            continue
        if _holds(replace(source, spec=_with_annotation(source.spec, candidate)), identifier):
            return candidate
    return frozen(text, name)


def frozen(text: str, name: str) -> str:
    """The text with `name` frozen everywhere."""
    return with_marks(_without_additives(parse(text), name), [name], Identifier("", "^"))


def _holds(source: Source, identifier: str) -> bool:
    try:
        outcome = run_choices(source, identifier, splits_of(identifier))
    except (Unusable, NnscalerError):
        return False
    return outcome.count > 0 and not outcome.failures


def _with_annotation(spec: OperatorSpec, text: str) -> OperatorSpec:
    return replace(spec, annotation=text, linear=())


def _candidates(annotation: Annotation, name: str) -> Iterator[str]:
    """Other marks for `name`, and other choices of operands that enter additively, the likeliest first."""
    bare = _without_additives(annotation, name)
    yield with_marks(bare, [name], Identifier(""))
    summed = Identifier("", "+", "sum")
    yield with_marks(bare, [name], summed)
    lacking = [
        i for i, o in enumerate(bare.inputs) if isinstance(o, Operand) and all(n.name != name for n in o.identifiers())
    ]
    for position in lacking:
        yield with_marks(_additive(bare, [position]), [name], summed)
    if len(lacking) > 1:
        yield with_marks(_additive(bare, lacking), [name], summed)
    largest: Literal["max"] = "max"
    yield with_marks(bare, [name], Identifier("", "+", largest))


def _additive(annotation: Annotation, positions: list[int]) -> Annotation:
    inputs = tuple(
        replace(o, additive=True) if i in positions and isinstance(o, Operand) else o
        for i, o in enumerate(annotation.inputs)
    )
    return replace(annotation, inputs=inputs)


def _without_additives(annotation: Annotation, name: str) -> Annotation:
    """Additive marks that belong to `name` taken away: those of operands that lack no other reduction identifier."""
    reductions = {i.name for i in annotation.identifiers() if i.mark == "+" and i.name != name}

    def plain(operand: Operand | Opaque) -> Operand | Opaque:
        if isinstance(operand, Opaque) or not operand.additive:
            return operand
        has = {i.name for i in operand.identifiers()}
        return operand if reductions - has else replace(operand, additive=False)

    return replace(annotation, inputs=tuple(plain(o) for o in annotation.inputs))
