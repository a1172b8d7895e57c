"""`*` for leading dims: an annotation of one call's number of dims, said for any number of them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from op_registry.annotation.parser import parse
from op_registry.annotation.printer import print_annotation
from op_registry.annotation.rules import map_identifiers
from op_registry.annotation.syntax import Annotation, Identifier, Opaque, Operand

from verify.operators.suggest.probe_call import Question


def with_star(text: str, question: Question) -> tuple[str, Question] | None:
    """Return the text with `*` for the dims with which the first operand and every output begin, and a call with
    another number of them, on which the function runs; None where there is no such thing."""
    annotation = parse(text)
    length = _leading(annotation)
    inputs = [o for o in annotation.inputs if isinstance(o, Operand)]
    if not length or len(inputs) != len(question.tensors):
        return None
    names = _names(inputs[0])[:length]
    tensors = [
        _regrouped(t, length) if _names(o)[:length] == names else t
        for t, o in zip(question.tensors, inputs, strict=True)
    ]
    other = question.changed(tensors, {})
    try:
        outputs = other.run(other.tensors, {})
    except Exception:  # noqa: BLE001 - the number of dims was our choice
        return None
    if any(o is not None and not bool(o.isfinite().all()) for o in outputs):
        return None
    star = Identifier("*")

    def on_operand(operand: Operand | Opaque) -> Operand | Opaque:
        if isinstance(operand, Opaque) or _names(operand)[:length] != names:
            return operand
        return replace(operand, dims=(star, *operand.dims[length:]))

    starred = Annotation(tuple(map(on_operand, annotation.inputs)), tuple(map(on_operand, annotation.outputs)))
    return print_annotation(_renamed(starred, question)), other


def _renamed(annotation: Annotation, question: Question) -> Annotation:
    """Rename the identifiers to letters from the start of the alphabet."""
    letters = (c for c in string.ascii_lowercase if c not in question.integers)
    names: dict[str, str] = {}
    for identifier in annotation.identifiers():
        if len(identifier.name) == 1 and not identifier.is_wildcard and identifier.name not in question.integers:
            names.setdefault(identifier.name, "")
    for name in names:
        names[name] = next(letters)
    return map_identifiers(annotation, lambda i: replace(i, name=names.get(i.name, i.name)))


def _leading(annotation: Annotation) -> int:
    """Count the leading dims that may become `*`: one identifier each, without mark, in the same places everywhere."""
    operands = list(annotation.operands())
    first = next((o for o in annotation.inputs if isinstance(o, Operand)), None)
    outputs = [o for o in annotation.outputs if isinstance(o, Operand)]
    if first is None or not outputs:
        return 0
    length = 0
    for dim in first.dims:
        if not isinstance(dim, Identifier) or dim.mark:
            break
        length += 1
    while length:
        names = _names(first)[:length]
        with_them = [o for o in operands if _names(o)[:length] == names]
        without = [o for o in operands if not any(i.name in names for i in o.identifiers())]
        if all(o in with_them for o in outputs) and len(with_them) + len(without) == len(operands):
            return length
        length -= 1
    return 0


def _names(operand: Operand) -> list[str]:
    """Return the name of every dim that is one identifier, "" for the others."""
    return [d.name if isinstance(d, Identifier) and not d.mark else "" for d in operand.dims]


def _regrouped(tensor: Tensor, length: int) -> Tensor:
    """Return the leading dims as one, or one of them as two."""
    shape = tuple(tensor.shape)
    leading: Sequence[int] = (prod(shape[:length]),) if length > 1 else (2, shape[0] // 2)
    return tensor.reshape(*leading, *shape[length:])
