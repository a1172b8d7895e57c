"""Explain why a call does not fit its annotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from op_registry.annotation.syntax_tree import Annotation, Dim, Opaque, Operand, print_operand
from op_registry.errors import AnnotationError, annotation_error

Shape = tuple[int, ...]


class Mismatch(Exception):
    """Raised while sizes are bound; `misfit` makes the error that the user sees."""

    def __init__(
        self, message: str, sizes: Mapping[str, int], at: Dim | Operand | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.sizes = dict(sizes)
        self.at = at
        self.hint = hint


def misfit(
    mismatch: Mismatch,
    text: str,
    annotation: Annotation,
    input_shapes: Sequence[Shape | None],
    output_shapes: Sequence[Shape | None] | None,
    given: Mapping[str, int],
) -> AnnotationError:
    """Describe the mismatch with the text and a caret, every shape beside its operand, and the sizes bound so far."""
    notes = [*_table("input", annotation.inputs, input_shapes)]
    notes += _table("output", annotation.outputs, output_shapes or ())
    if given:
        notes.append("given: " + _listed(given))
    bound = {n: s for n, s in mismatch.sizes.items() if n not in given}
    if bound:
        notes.append("bound so far: " + _listed(bound))
    spans = [] if mismatch.at is None else [(mismatch.at.start, mismatch.at.end)]
    return annotation_error(
        "annotation_does_not_fit", mismatch.message, text, spans, notes=notes, hint=mismatch.hint or _advice(mismatch)
    )


def _advice(mismatch: Mismatch) -> str | None:
    if mismatch.at is None:
        return "one operand per tensor; `?` for an argument that is not one; an empty side has no operands"
    if isinstance(mismatch.at, Operand):
        return "one dim per dim of the tensor; `*` stands for any number of them, `()` for a scalar tensor"
    return None


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _table(side: str, operands: Sequence[Operand | Opaque], shapes: Sequence[Shape | None]) -> list[str]:
    rows = []
    for number in range(max(len(operands), len(shapes))):
        operand = f"`{print_operand(operands[number])}`" if number < len(operands) else "no operand"
        if number >= len(shapes):
            rows.append(f"{side} {number}: {operand}")
            continue
        shape = shapes[number]
        rows.append(f"{side} {number}: {operand} for " + ("no tensor" if shape is None else f"shape {shape}"))
    return rows
