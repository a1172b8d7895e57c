"""Find the constraint that cannot hold, and what would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.placement import Choice
from nnscaler.planning.configurations import Configuration
from nnscaler.planning.constraints.constraint import Constraint


def without_choice(
    constraint: Constraint, graph: Graph, options: Mapping[str, tuple[Choice, ...]], tp: int
) -> NnscalerError | None:
    """Return the error for the first operation to which the constraint leaves none of its `options` on `tp`."""
    for op in graph.operations:
        choices = options[op.name]
        if any(constraint.allows(op, choice) for choice in choices):
            continue
        guilty = [c.text for c in constraint.each if not any(c.allows(op, choice) for choice in choices)]
        what = f"the constraint {guilty[0]!r} leaves" if guilty else f"{_list(constraint.each)} together leave"
        known = ", ".join(str(choice) for choice in choices[:8]) + (", ..." if len(choices) > 8 else "")
        return NnscalerError(
            "plan_illegal",
            f"{what} {op.name} ({op.operator}) no choice on tp={tp}",
            where=op.where,
            help=f"its choices: {known}",
        )
    return None


def without_configuration(constraint: Constraint, space: Sequence[Configuration]) -> str | None:
    """Say which constraint permits none of the configurations, or which ones together; None where some are
    permitted."""
    if any(map(constraint.permits, space)):
        return None
    guilty = [c.text for c in constraint.each if not any(map(c.permits, space))]
    if guilty:
        return f"the constraint {guilty[0]!r} permits none"
    partial = [c for c in constraint.each if not all(map(c.permits, space))]
    return f"{_list(partial)} together permit none"


def _list(constraints: Iterable[Constraint]) -> str:
    return "the constraints " + ", ".join(repr(c.text) for c in constraints)
