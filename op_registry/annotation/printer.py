"""Annotation -> canonical text; `parse(print_annotation(a)) == a`."""

from __future__ import annotations

from op_registry.annotation.syntax import Annotation, Concat, Dim, Group, Identifier, Integer, Opaque, Operand


def print_annotation(annotation: Annotation) -> str:
    """Write the canonical text: one space between dims, `, ` between operands, ` -> ` between sides."""
    left = ", ".join(print_operand(o) for o in annotation.inputs)
    right = ", ".join(print_operand(o) for o in annotation.outputs)
    return f"{left} -> {right}".strip()


def print_operand(operand: Operand | Opaque) -> str:
    if isinstance(operand, Opaque):
        return "?"
    sign = "+" if operand.additive else ""
    return sign + (" ".join(print_dim(d) for d in operand.dims) or "()")


def print_dim(dim: Dim) -> str:
    if isinstance(dim, Integer):
        return str(dim.size)
    if isinstance(dim, Group):
        return "(" + " ".join(print_dim(f) for f in dim.factors) + ")"
    if isinstance(dim, Concat):
        return "[" + " ".join(print_dim(p) for p in dim.parts) + "]"
    return print_identifier(dim)


def print_identifier(identifier: Identifier) -> str:
    named = identifier.mark == "+" and identifier.reduction != "sum"
    return identifier.name + identifier.mark + (identifier.reduction if named else "")
