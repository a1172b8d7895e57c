"""Say why there is no plan: the constraints that cannot hold, or the memory that would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_placement import Choice
from nnscaler.planning.cluster.description import Cluster, show_bytes, show_enough_bytes
from nnscaler.planning.constraints import Constraint
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.branch_and_bound import Search
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.solver.problem import Infeasible


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


def explain_no_choice(
    subject: PlanningCache, constraint: Constraint | None, cluster: Cluster, error: Infeasible | NnscalerError
) -> NnscalerError:
    """Return the error for constraints that leave an operation no choice, whatever tp is; `error` where that is another
    one."""
    if constraint is not None:
        free = PlanningCache(subject.graph, subject.signatures, subject.cost)
        space = subject.space(cluster.devices)
        for tp in sorted({c.tp for c in space if c.tp > 1 and constraint.permits(c)}):
            found = without_choice(constraint, subject.graph, free.options(tp), tp)
            if found is not None:
                return found
    if isinstance(error, NnscalerError):
        return error
    told = "" if constraint is None else f" that keep to {constraint.text!r}"
    return NnscalerError(
        "plan_illegal",
        f"no choices of all operations{told} go together: what some make cannot be turned into what others read",
        help="take a constraint away",
    )


def explain_nothing_found(
    subject: PlanningCache,
    found: Search,
    cluster: Cluster,
    limit: float,
    constraint: Constraint | None,
    refused: str | None,
) -> NnscalerError:
    """Return the error for a search without a result. `refused` says why micro-batches do not go with the model."""
    if not found.solved and not found.too_large and refused is not None:
        told = "" if constraint is None else f" that keeps to {constraint.text!r}"
        return NnscalerError(
            "micro_batches_coupled",
            f"no configuration of {cluster.devices} ranks{told} has a program: {refused}",
            help="permit one micro-batch, or compute in float32 what is reduced over the batch",
        )
    if not found.solved and not found.too_large:
        space = list(subject.space(cluster.devices))
        guilty = without_configuration(constraint, space) if constraint is not None else None
        placed = [c.text for c in constraint.each if c.at or c.together] if constraint is not None else []
        if guilty is None and placed:
            guilty = f"no pipeline stages keep to {', '.join(map(repr, placed))}"
        return NnscalerError(
            "plan_illegal",
            f"no configuration of {cluster.devices} ranks is permitted (batch {subject.batch}, "
            f"{subject.described})" + (f": {guilty}" if guilty else ""),
            help="take a constraint away, or change the number of ranks or the batch",
        )
    nearest = min((e for e in found.solved), key=lambda e: e.memory, default=None)
    if nearest is None and found.least <= limit:
        message = f"{show_bytes(found.least)} a rank and more are at rest, before any activations"
        help = "more ranks, more memory per rank, a smaller batch, or a smaller model"
    elif nearest is None:
        message = f"parameters, gradients and optimizer states alone take {show_bytes(found.least)} a rank or more"
        help = "more ranks, more memory per rank, or a smaller model"
    else:
        message = f"the least that was found is {show_bytes(nearest.memory)} a rank ({nearest})"
        help = f"--memory {show_enough_bytes(nearest.memory)} would do; or more ranks, or a smaller batch"
    return NnscalerError(
        "plan_too_large",
        f"no plan for {cluster.devices} ranks of {cluster.name} fits into {show_bytes(limit)} a rank: {message}",
        help=help,
    )
