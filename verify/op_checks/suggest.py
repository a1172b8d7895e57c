"""An annotation that holds where the given one does not: other marks for one identifier, each tested like any claim.

Nothing is suggested that was not tested; freezing the identifier is the last resort.
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
from verify.op_checks.check import check_target
from verify.op_checks.enumerate import Enumerator, Unusable, bases
from verify.op_checks.options import OpOptions
from verify.op_checks.runner import Runner


def suggest(spec: OperatorSpec, options: OpOptions, identifier: str) -> str | None:
    """An annotation under which splitting `identifier` works, tested; None if the annotation is not a text."""
    text = spec.annotation
    if not isinstance(text, str):
        return None
    name = "*" if identifier.startswith("*") else identifier
    for candidate in _candidates(parse(text), name):
        try:
            parse_checked(candidate)
        except NnscalerError:
            continue
        if holds(replace(spec, annotation=candidate, linear=()), options, identifier):
            return candidate
    return frozen(text, name)


def frozen(text: str, name: str) -> str:
    """The text with `name` frozen everywhere."""
    return with_marks(_without_additives(parse(text), name), [name], Identifier("", "^"))


def holds(spec: OperatorSpec, options: OpOptions, identifier: str) -> bool:
    """Whether splitting the identifier passes every case, one at least."""
    runner = Runner(spec, options)
    cases = 0
    try:
        for base in bases(runner):
            if identifier not in base.leaders:
                continue
            outcome = check_target(Enumerator(runner, base), identifier)
            if outcome.failures:
                return False
            cases += outcome.cases
    except (Unusable, NnscalerError):
        return False
    return cases > 0


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
