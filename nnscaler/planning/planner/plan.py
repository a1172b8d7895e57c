"""The planner's front door: the best plan for a graph on a described cluster, with a certificate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.signature import Signature
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cluster.units import show_bytes
from nnscaler.planning.constraints import Constraint
from nnscaler.planning.constraints.blame import without_choice, without_configuration
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model import CostModel
from nnscaler.planning.planner.configurations import Configuration, configurations
from nnscaler.planning.planner.cuts import cuts_of
from nnscaler.planning.planner.evaluate import Evaluated
from nnscaler.planning.planner.result import Certificate, certificate, plan_of
from nnscaler.planning.planner.search import Search, search
from nnscaler.planning.planner.subject import FREE, Subject
from nnscaler.planning.solver.problem import Infeasible
from nnscaler.transform.choose import follow_batch
from nnscaler.transform.plan import Plan

DOUBLINGS, HALVINGS = 10, 4  # of a limit of memory, to find one that is enough


@dataclass(frozen=True)
class Found:
    """A plan, what is known of it, and what it was chosen among."""

    plan: Plan
    certificate: Certificate
    subject: Subject
    search: Search

    @property
    def best(self) -> Evaluated:
        assert self.search.best is not None
        return self.search.best

    def layers_of(self, stage: int) -> str:
        """`0..3`: the layers of a pipeline device, with how many are recomputed; `none` where it has none."""
        items = self.best.stages[stage].items
        first, last = max(items[0], 1), min(items[1], len(self.subject.layers) + 1)
        again = len(self.best.again.intersection(range(first - 1, last - 1)))
        told = f" ({again} recomputed)" if again else ""
        return f"{first - 1}..{last - 2}{told}" if last > first else "none"


def find_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    cluster: Cluster,
    *,
    memory: float | None = None,
    cost: CostModel | None = None,
    constraint: Constraint | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """The fastest plan for all devices of a cluster, each with `memory` bytes (None: what the cluster says).

    Raises NnscalerError: `plan_too_large` where nothing fits, `plan_illegal` where nothing is permitted; it names the
    constraint that cannot hold.
    """
    with _without_collector():
        return _find_plan(graph, signatures, cluster, memory, cost, constraint, progress)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Without the search for cycles of references: a search makes many objects and no cycles, and looking for some
    would walk the whole traced model again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _find_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    cluster: Cluster,
    memory: float | None,
    cost: CostModel | None,
    constraint: Constraint | None,
    progress: Callable[[str], None],
) -> Found:
    limit = float(cluster.device.memory if memory is None else memory)
    model = cost or AnalyticCost(cluster)
    subject = Subject(graph, signatures, model, constraint or FREE)
    known: dict[tuple[int, int], str | None] = {}

    def allowed(c: Configuration) -> bool:
        return constraint is None or (constraint.permits(c) and _may_be_cut(subject, c))

    def impossible(c: Configuration) -> bool:
        key = (c.dp, c.micro_batches)
        if key not in known:
            known[key] = _refused(subject, c)
            if known[key] is not None:
                progress(f"{c}: {known[key]}")
        return known[key] is not None

    def look(most: float, told: Callable[[str], None]) -> Search:
        return search(subject, cluster.devices, most, allowed, told, impossible)

    try:
        found = look(limit, progress)
    except (Infeasible, NnscalerError) as error:
        raise _without_choice(subject, constraint, cluster, error) from None
    if found.best is None:
        if found.too_large and not found.solved and found.least <= limit:
            progress(f"nothing fits into {show_bytes(limit)}: looking for the least memory that does")
            found = replace(found, solved=_least_that_fits(lambda most: look(most, lambda _: None), limit))
        refused = next((reason for reason in known.values() if reason is not None), None)
        raise _nothing(subject, found, cluster, limit, constraint, refused)
    made = plan_of(subject, found.best)
    return Found(made, certificate(found, cluster.name, model.identity, limit), subject, found)


def _refused(subject: Subject, c: Configuration) -> str | None:
    """Why micro-batches of this number cannot be: operations that couple them show only when they are asked for."""
    mesh = (("dp", c.dp),) if c.dp > 1 else ()
    try:
        follow_batch(subject.graph, subject.signatures, Plan(mesh, (), c.micro_batches), mesh)
    except NnscalerError as error:
        return str(error).splitlines()[0]
    return None


def _may_be_cut(subject: Subject, c: Configuration) -> bool:
    """Whether there are stages that keep to the constraints."""
    return cuts_of(subject.items, [1.0] * (len(subject.layers) + 2), c.pp, subject.constraint) is not None


def _least_that_fits(look: Callable[[float], Search], limit: float) -> tuple[Evaluated, ...]:
    """A plan for a limit of memory that is hardly larger than the least that has one; none where it is very large.
    `look`: searches within a limit."""
    fits: Evaluated | None = None
    low, high = limit, 2 * limit
    for _ in range(DOUBLINGS):
        fits = look(high).best
        if fits is not None:
            break
        low, high = high, 2 * high
    for _ in range(HALVINGS if fits is not None else 0):
        assert fits is not None
        middle = (low * min(high, fits.memory)) ** 0.5
        found = look(middle).best
        low, high, fits = (low, middle, found) if found is not None else (middle, high, fits)
    return () if fits is None else (fits,)


def _without_choice(
    subject: Subject, constraint: Constraint | None, cluster: Cluster, error: Infeasible | NnscalerError
) -> NnscalerError:
    """The error for constraints that leave nothing to choose, whatever tp is; `error` where that is another one."""
    if constraint is not None:
        free = Subject(subject.graph, subject.signatures, subject.cost)
        space = configurations(cluster.devices, subject.batch, len(subject.layers))
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


def _nothing(
    subject: Subject,
    found: Search,
    cluster: Cluster,
    limit: float,
    constraint: Constraint | None,
    refused: str | None,
) -> NnscalerError:
    """The error for a search without a result. `refused`: why micro-batches do not go with the model."""
    if not found.solved and not found.too_large and refused is not None:
        told = "" if constraint is None else f" that keeps to {constraint.text!r}"
        return NnscalerError(
            "micro_batches_coupled",
            f"no configuration of {cluster.devices} ranks{told} has a program: {refused}",
            help="permit one micro-batch, or compute in float32 what is reduced over the batch",
        )
    if not found.solved and not found.too_large:
        space = list(configurations(cluster.devices, subject.batch, len(subject.layers)))
        guilty = without_configuration(constraint, space) if constraint is not None else None
        placed = [c.text for c in constraint.each if c.at or c.together] if constraint is not None else []
        if guilty is None and placed:
            guilty = f"no pipeline stages keep to {', '.join(map(repr, placed))}"
        return NnscalerError(
            "plan_illegal",
            f"no configuration of {cluster.devices} ranks is permitted (batch {subject.batch}, "
            f"{len(subject.layers)} layers)" + (f": {guilty}" if guilty else ""),
            help="take a constraint away, or change the number of ranks or the batch",
        )
    nearest = min((e for e in found.solved), key=lambda e: e.memory, default=None)
    if nearest is None and found.least <= limit:
        message = f"{show_bytes(found.least)} a rank and more are at rest, before any activations"
        help = "more ranks, more memory per rank, a smaller batch of sample_inputs(), or a smaller model"
    elif nearest is None:
        message = f"parameters, gradients and optimizer states alone take {show_bytes(found.least)} a rank or more"
        help = "more ranks, more memory per rank, or a smaller model"
    else:
        message = f"the least that was found is {show_bytes(nearest.memory)} a rank ({nearest})"
        help = f"--memory {show_bytes(nearest.memory)} would do; or more ranks, or a smaller batch of sample_inputs()"
    return NnscalerError(
        "plan_too_large",
        f"no plan for {cluster.devices} ranks of {cluster.name} fits into {show_bytes(limit)} a rank: {message}",
        help=help,
    )
