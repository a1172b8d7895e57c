"""Check that an annotation is well-formed: rules that it must keep, whatever the shapes.

Each rule refuses with the reason, a caret, and the corrected text where there is one to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from op_registry.annotation.parser import parse
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
    print_annotation,
    print_identifier,
    print_operand,
)
from op_registry.errors import AnnotationError, annotation_error

OutputOnly = bool | frozenset[str]  # may outputs have identifiers of their own: all, none, or these


@lru_cache(maxsize=16384)
def parse_checked(text: str, output_only: OutputOnly = True) -> Annotation:
    """Parse and check. Raises `AnnotationError` (code `annotation_syntax` or `annotation_illegal`).

    `output_only` says which identifiers may appear in outputs alone: those of operators whose call is rewritten for
    a shard (`localize`, `shape_argument`, an argument of that name). Frozen ones always may.
    """
    annotation = parse(text)
    check(annotation, text, output_only)
    return annotation


def check(annotation: Annotation, text: str, output_only: OutputOnly = True) -> None:
    """Raise `AnnotationError` (code `annotation_illegal`) at the first rule that `annotation` breaks."""
    ties = tied_identifiers(annotation)
    for rule in (
        _refuse_repeated,
        _refuse_mixed_marks,
        _refuse_split_ties,
        _refuse_missing,
        _refuse_idle_reduction,
        _refuse_bad_rows,
    ):
        rule(annotation, text, ties)
    _refuse_bad_additive(annotation, text)
    _refuse_output_only(annotation, text, output_only)


def tied_identifiers(annotation: Annotation) -> dict[str, tuple[str, ...]]:
    """identifier -> the identifiers that are split together with it (itself included), in order of appearance."""
    ties: dict[str, tuple[str, ...]] = {i.name: (i.name,) for i in annotation.identifiers()}
    for operand in annotation.operands():
        for dim in operand.dims:
            if isinstance(dim, Concat):
                together = tuple(dict.fromkeys(name for part in dim.parts for name in ties[part.name]))
                ties.update(dict.fromkeys(together, together))
    return ties


def map_identifiers(annotation: Annotation, function: Callable[[Identifier], Identifier]) -> Annotation:
    """Replace every identifier of the annotation."""

    def on_dim(dim: Dim) -> Dim:
        if isinstance(dim, Identifier):
            return function(dim)
        if isinstance(dim, Group):
            return replace(dim, factors=tuple(f if isinstance(f, Integer) else function(f) for f in dim.factors))
        if isinstance(dim, Concat):
            return replace(dim, parts=tuple(function(p) for p in dim.parts))
        return dim

    def on_operand(operand: Operand | Opaque) -> Operand | Opaque:
        if isinstance(operand, Opaque):
            return operand
        return replace(operand, dims=tuple(on_dim(d) for d in operand.dims))

    return Annotation(tuple(map(on_operand, annotation.inputs)), tuple(map(on_operand, annotation.outputs)))


def with_marks(annotation: Annotation, names: Iterable[str], like: Identifier) -> str:
    """Write the canonical text of `marked`."""
    return print_annotation(marked(annotation, names, like))


def marked(annotation: Annotation, names: Iterable[str], like: Identifier) -> Annotation:
    """Return the annotation with the mark of `like` on every occurrence of `names`. What is read along one of them
    (`s<q`) is frozen where it gets one."""
    chosen = frozenset(names)

    def mark(identifier: Identifier) -> Identifier:
        if identifier.name in chosen:
            return replace(identifier, mark=like.mark, reduction=like.reduction, rows=like.rows)
        return replace(identifier, mark="^", rows="") if like.mark and identifier.rows in chosen else identifier

    return map_identifiers(annotation, mark)


def _marked(mark: Mark) -> Identifier:
    return Identifier("", mark)


def _error(text: str, message: str, at: Iterable[Identifier | Operand], hint: str | None) -> AnnotationError:
    return annotation_error("annotation_illegal", message, text, [(i.start, i.end) for i in at], hint=hint)


def _occurrences(annotation: Annotation, name: str) -> list[Identifier]:
    return [i for i in annotation.identifiers() if i.name == name]


def _outputs(annotation: Annotation) -> Iterator[Operand]:
    return (o for o in annotation.outputs if isinstance(o, Operand))


def _names(operand: Operand) -> frozenset[str]:
    return frozenset(i.name for i in operand.identifiers())


Ties = dict[str, tuple[str, ...]]


def _refuse_repeated(annotation: Annotation, text: str, ties: Ties) -> None:
    for operand in annotation.operands():
        seen: dict[str, Identifier] = {}
        for identifier in operand.identifiers():
            name = identifier.name
            if name in seen and not identifier.is_frozen:
                hint = f"no layout splits a diagonal: `{with_marks(annotation, ties[name], _marked('^'))}`"
                raise _error(text, f"`{name}` twice in one operand", [seen[name], identifier], hint)
            seen[name] = identifier


def _refuse_mixed_marks(annotation: Annotation, text: str, ties: Ties) -> None:
    for members in dict.fromkeys(ties.values()):
        found = [i for i in annotation.identifiers() if i.name in members]
        kinds = {(i.mark, i.reduction, i.rows) for i in found}
        if len(kinds) == 1:
            continue
        outputs = list(_outputs(annotation))
        kept = all(_names(o) & set(members) for o in outputs)
        strongest = next((i for mark in ("^", "<", "+") for i in found if i.mark == mark), found[0])
        if strongest.mark == "+" and kept:
            strongest = _marked("")
        hint = f"`{with_marks(annotation, members, strongest)}`"
        if strongest.mark != "^":
            hint += (
                f" agrees, and `verify-op` tests it; `{with_marks(annotation, members, _marked('^'))}` splits nothing"
            )
        if len(members) > 1:
            names = ", ".join(f"`{m}`" for m in members)
            raise _error(text, f"{names} are split together, so they have the same mark", found, hint)
        raise _error(text, f"the marks of `{members[0]}` must agree on every occurrence", found, hint)


def _refuse_split_ties(annotation: Annotation, text: str, ties: Ties) -> None:
    for operand in annotation.operands():
        for members in {ties[i.name] for i in operand.identifiers() if len(ties[i.name]) > 1 and not i.is_frozen}:
            dims = [d for d in operand.dims if any(i.name in members for i in Operand((d,)).identifiers())]
            if len(dims) > 1:
                found = [i for i in operand.identifiers() if i.name in members]
                names = ", ".join(f"`{m}`" for m in members)
                hint = f"`{with_marks(annotation, members, _marked('^'))}`"
                raise _error(text, f"{names} are split together, so one operand cannot have two of them", found, hint)


def _refuse_missing(annotation: Annotation, text: str, ties: Ties) -> None:
    for first in annotation.identifiers():
        if first.mark:
            continue
        members = ties[first.name]
        for number, output in enumerate(annotation.outputs):
            if isinstance(output, Opaque) or _names(output) & set(members):
                continue
            frozen = with_marks(annotation, members, _marked("^"))
            message = f"`{first.name}` has no mark, but output {number} `{print_operand(output)}` lacks it"
            summed = with_marks(annotation, members, _marked("+"))
            hint = f"`{frozen}` freezes it; `{summed}` says that splitting it gives partial sums"
            raise _error(text, message, _occurrences(annotation, first.name), hint)


def _refuse_idle_reduction(annotation: Annotation, text: str, ties: Ties) -> None:
    outputs = list(_outputs(annotation))
    for first in annotation.identifiers():
        members = set(ties[first.name])
        if first.mark == "+" and outputs and all(_names(o) & members for o in outputs):
            message = f"the mark of `{print_identifier(first)}` has no effect: every output has `{first.name}`"
            hint = f"`{with_marks(annotation, ties[first.name], _marked(''))}`"
            raise _error(text, message, _occurrences(annotation, first.name), hint)


def _refuse_bad_rows(annotation: Annotation, text: str, ties: Ties) -> None:
    for identifier in (i for i in annotation.identifiers() if i.mark == "<"):
        rows = identifier.rows or identifier.name
        found = _occurrences(annotation, rows)
        frozen = f"`{with_marks(annotation, ties[identifier.name], _marked('^'))}` freezes `{identifier.name}`"
        if identifier.is_wildcard or len(ties[identifier.name]) > 1:
            raise _error(text, "`<` marks one identifier, by itself in a dim", [identifier], frozen)
        if rows == identifier.name:
            continue
        if not found or any(i.mark for i in found):
            message = f"`{print_identifier(identifier)}` is read along `{rows}`, which is no identifier without a mark"
            raise _error(text, message, [identifier], frozen)
        for number, output in enumerate(annotation.outputs):
            if isinstance(output, Operand) and identifier.name in _names(output):
                message = f"`{print_identifier(identifier)}` is read along `{rows}`, and output {number} has it"
                raise _error(text, message, [identifier], frozen)


def _refuse_bad_additive(annotation: Annotation, text: str) -> None:
    for output in _outputs(annotation):
        if output.additive:
            hint = "an output becomes a partial sum by itself where it lacks a reduction identifier"
            raise _error(text, "`+` before an output", [output], hint)
    sums = {i.name: i for i in annotation.identifiers() if i.mark == "+" and i.reduction == "sum"}
    for operand in (o for o in annotation.inputs if isinstance(o, Operand) and o.additive):
        lacking = [i for name, i in sums.items() if name not in _names(operand)]
        maxima = [i for i in annotation.identifiers() if i.reduction == "max" and i.name not in _names(operand)]
        plain = replace(operand, additive=False)
        corrected = replace(annotation, inputs=tuple(plain if o is operand else o for o in annotation.inputs))
        if not lacking:
            message = f"`{print_operand(operand)}` has an additive mark without effect: there is no sum that it lacks"
            raise _error(text, message, [operand], f"`{print_annotation(corrected)}`")
        if maxima:
            message = f"`{print_operand(operand)}` is additive, but `{print_identifier(maxima[0])}` is no sum"
            hint = f"`{with_marks(corrected, [i.name for i in lacking], _marked('^'))}`"
            raise _error(text, message, [operand, *maxima], hint)
        for identifier in lacking:
            for number, result in enumerate(annotation.outputs):
                if isinstance(result, Operand) and identifier.name in _names(result):
                    name, shown = identifier.name, print_operand(operand)
                    message = f"`{shown}` is additive under a split of `{name}`, but output {number} keeps `{name}`"
                    found: list[Identifier | Operand] = [operand, *(i for i in result.identifiers() if i.name == name)]
                    frozen = with_marks(corrected, [name], _marked("^"))
                    raise _error(text, message, found, f"`{frozen}` freezes `{name}`")


def _refuse_output_only(annotation: Annotation, text: str, allowed: OutputOnly) -> None:
    if allowed is True:
        return
    in_inputs = {i.name for o in annotation.inputs if isinstance(o, Operand) for i in o.identifiers()}
    for output in _outputs(annotation):
        for identifier in output.identifiers():
            name = identifier.name
            if identifier.is_frozen or name in in_inputs or (allowed and name in allowed):
                continue
            message = f"`{name}` is in an output only: nothing says how a call for one shard of it looks"
            hint = (
                f"`{with_marks(annotation, [name], _marked('^'))}` freezes it; else the operator needs an argument"
                f" named `{name}`, a shape argument or a localize function"
            )
            raise _error(text, message, [identifier], hint)
