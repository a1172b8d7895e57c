"""The planner's front door: the fastest plan for a graph on a described cluster, with a proof of how good it is.

The idea
--------

There are far too many plans to try, so the planner never asks "how fast is this plan?" before it has asked "how fast
can any plan of this kind be?". Each kind gets a lower bound that is cheap to compute. Kinds whose bound is no better
than the best plan in hand are never solved, and the least bound of all that is left says how far from the optimum that
plan can be. There are three levels, each with a method from the literature:

1  which configuration (dp, tp, pp, micro-batches, recomputation, ZeRO): best-first search (`branch_and_bound`)
2  what a stage spends its memory on: Lagrangian relaxation of the limit of memory (`bounds/lagrangian.py`,
   `solver.sweep_memory_price`)
3  which strategy each operation takes: min-weight variable elimination, and min-plus powers of equal layers, which
   are both exact (`solver.variable_elimination`, `solver.fold_equal_layers`)

Between 1 and 2, a dynamic program spreads the layers over pipeline stages (`stage_partition_dp`). What level 2 leaves
open is filled by mixing two ways to run a layer (`stage_strategy_mix`), or by repair and branching (`solver.solve`).

Level 2 by hand
---------------

Two equal layers; each may keep its activations (10 ms, 6 GB) or recompute them (13 ms, 2 GB). The limit is 8 GB.
Instead of the limit, let a GB cost 0.75 ms: now both ways cost 14.5 ms, and two layers cost 29 ms whatever they do. Any
plan that fits uses at most 8 GB, so it has paid at most 6 ms for memory: it takes 29 - 6 = 23 ms or more. One layer of
each way takes exactly 23 ms and 8 GB, so it is optimal. With a limit of 7 GB the same price proves 23.75 ms, and no
price proves more, while the best plan takes 26 ms (both recompute): the bound is true, and not tight. That difference
is the gap.

All levels, as they run
-----------------------

Eight blocks (LayerNorm, Linear 4096 to 16384, GELU, Linear back, residual) in float32, 8 sequences of 2048 tokens, on 4
ranks of `h100x8` with 4.7 GB each. Values, gradients and both moments of Adam take 17.2 GB, 4.3 GB a rank if nothing is
held twice, so 0.4 GB are left for activations. There are 44 configurations:

30 of 44   cannot hold what rests and one micro-batch of every layer
tp=4       first bound 0.570 s a step, the least of all, with any number of micro-batches
           2 micro-batches: infinite within the memory, so nothing fits
           4 micro-batches: 0.761 s from the shapes of the whole batch, and stays in the queue
           8 micro-batches: 0.698 s, then 0.704 s from its own shapes, then 0.723 s at finer prices of memory
dp=2 tp=2  with ZeRO-3 and 4 micro-batches: 0.769 s, and stays in the queue

At 0.723 s, tp=4 with 8 micro-batches still has the least bound, so it is solved: 0.739 s and 4.68 GB, with 6 of the 8
layers recomputed; at the margin one more GB would save 14 ms. Everything that is left has a bound above 0.739 s. So the
search ends after one of 44 configurations was solved; 9 were pruned, 34 were too large, and the certificate says: 0.739
s, the optimum of the space is at least 0.723 s, gap 2.2 %. With 80 GB a rank the same search ends with dp=2 tp=2 and
ZeRO-3 at 0.583 s, which equals its bound.

The invariant
-------------

At every moment, the optimum of the space is no less than the least of: the bounds in the queue, and the bounds of what
was solved. Every bound is of the same tables that price plans, so it is a statement about the cost model, not about a
machine. Anything that may only make a search faster (rough shapes, fewer states, coarse prices) must make bounds
smaller, never larger. One assumption is left to the cost model: the same work in more and smaller micro-batches takes
no less time. A plan, on the other hand, is always evaluated by the whole tables: no relaxation ever reaches `seconds`.

Why not otherwise
-----------------

One integer program for all operations (as in Alpa's intra-operator pass) is exact too, but grows with every layer: it
does not see that they are equal. A search by mutation or reinforcement finds good plans and cannot say how good. A
dynamic program over memory in steps of bytes has as many states as the steps are fine, per stage. Prices have one
dimension, are shared by all layers, and give a proof.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nnscaler.error_text import first_line
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Choice
from nnscaler.planning.cluster.description import Cluster, show_bytes, show_enough_bytes
from nnscaler.planning.constraints import Constraint
from nnscaler.planning.context_and_expert_parallel import contexts
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.branch_and_bound import Search, search
from nnscaler.planning.planner.build_certified_plan import Certificate, certificate, plan_of
from nnscaler.planning.planner.evaluate_configuration import Evaluated, cuts_of
from nnscaler.planning.planner.planner_graph import FREE, PlanningCache
from nnscaler.planning.sharding.parameter_and_activation_memory import CLUSTERS_MEMORY, MemoryBudget, bytes_of_optimizer
from nnscaler.planning.solver.problem import Infeasible
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.pipeline_cuts import describe_modules
from nnscaler.transform.plan import DP, Plan

# Find the constraint that cannot hold, and what would.


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


DOUBLINGS, HALVINGS = 10, 4  # of a limit of memory, to find one that is enough


@dataclass(frozen=True)
class Found:
    """A plan with its certificate, and the space that it was chosen from.

    plan          steps that `compile` and `verify-plan` take
    certificate   seconds, bound, gap and memory
    subject       the graph with its tables
    search        the configurations that were solved
    """

    plan: Plan
    certificate: Certificate
    subject: PlanningCache
    search: Search

    @property
    def best(self) -> Evaluated:
        assert self.search.best is not None
        return self.search.best

    def layers_of(self, stage: int) -> str:
        """Return the layers of a pipeline device in words: `0..3`, with how many are recomputed; `none` where it has
        none; `stem .. block2` in a model without numbered layers."""
        items = self.best.stages[stage].items
        first, last = max(items[0], 1), min(items[1], len(self.subject.layers) + 1)
        again = len(self.best.again.intersection(range(first - 1, last - 1)))
        told = f" ({again} recomputed)" if again else ""
        if last <= first:
            return "none"
        if not self.subject.blocks:
            return f"{first - 1}..{last - 2}{told}"
        by_name, blocks = self.subject.graph.by_name, enumerate(self.subject.blocks, 1)
        inside = [(number, by_name[name]) for number, block in blocks for name in block.operations]
        return describe_modules([op for at, op in inside if first <= at < last], [op for _, op in inside]) + told

    def place_of(self, stage: int) -> str:
        """Return where a pipeline device lies in the model: `layers 0..3`, `no layers`, `stem .. block2`."""
        told = self.layers_of(stage)
        return "no layers" if told == "none" else told if self.subject.blocks else f"layers {told}"


def find_plan(
    graph: Graph,
    signatures: Mapping[str, Signature],
    cluster: Cluster,
    *,
    memory: MemoryBudget = CLUSTERS_MEMORY,
    cost: CostModel | None = None,
    constraint: Constraint | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """Return the fastest plan for all devices of a cluster.

    Raises NnscalerError: `plan_too_large` where nothing fits, `plan_illegal` where nothing is permitted; it names the
    constraint that cannot hold.
    """
    priced = (cost or AnalyticCost(cluster)).among(cluster.devices)
    kept, optimizer = constraint or FREE, bytes_of_optimizer(memory.optimizer)
    with _without_collector():
        every: list[Found] = []
        refused: list[NnscalerError] = []

        def subject_of(cp: int) -> PlanningCache:
            return PlanningCache(graph, signatures, priced, kept, optimizer, cp)

        def permitted(cp: int) -> bool:
            return any(map(kept.permits, subject_of(cp).space(cluster.devices)))

        for cp in contexts(graph, signatures, cluster.devices, permitted):
            subject = subject_of(cp)
            try:
                every.append(_find_plan(subject, cluster, memory.limit, constraint, progress))
            except NnscalerError as error:  # what the first one says is said, where none has a plan
                if error.code not in ("plan_too_large", "plan_illegal"):
                    raise
                refused.append(error)
        if not every:
            raise refused[0]
        return _best_of(every)


def _best_of(every: Sequence[Found]) -> Found:
    """Return the fastest plan found, certified within all that were searched: no plan of any is below the least
    bound."""
    best = min(every, key=lambda found: found.certificate.seconds)
    if len(every) == 1:
        return best
    parts = [found.certificate for found in every]
    bound = min(part.bound for part in parts)
    gap = max(0.0, 1 - bound / best.certificate.seconds)
    solved, left, too_large = (sum(getattr(p, name) for p in parts) for name in ("solved", "left", "too_large"))
    told = sorted((p.configuration, p.seconds, True) for p in parts if p is not best.certificate)
    others = sorted((*told, *best.certificate.runners_up), key=lambda one: (not one[2], one[1]))[:5]
    found = replace(
        best.certificate, bound=bound, gap=gap, solved=solved, left=left, too_large=too_large, runners_up=tuple(others)
    )
    return replace(best, certificate=found)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch off the search for reference cycles: the planner makes many objects and no cycles, and each collection
    would walk the whole traced model again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _find_plan(
    subject: PlanningCache,
    cluster: Cluster,
    memory: float | None,
    constraint: Constraint | None,
    progress: Callable[[str], None],
) -> Found:
    limit = float(cluster.device.memory if memory is None else memory)
    known: dict[tuple[int, int], str | None] = {}

    def allowed(c: Configuration) -> bool:
        if c.chunks > 1 and (subject.constraint.at or subject.constraint.together):
            return False  # they speak of devices with one stage
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
    return Found(made, certificate(subject, found, cluster.name, limit), subject, found)


def _refused(subject: PlanningCache, c: Configuration) -> str | None:
    """Return why the batch cannot be cut into so many micro-batches: operations that couple them show only when asked
    for."""
    mesh = ((DP, c.dp),) if c.dp > 1 else ()
    try:
        follow_batch(subject.graph, subject.signatures, Plan(mesh, (), c.micro_batches), mesh)
    except NnscalerError as error:
        return first_line(error)
    return None


def _may_be_cut(subject: PlanningCache, c: Configuration) -> bool:
    """Return whether there are stages that keep to the constraints."""
    stages = c.pp * c.chunks
    return cuts_of(subject.items, [1.0] * (len(subject.layers) + 2), stages, subject.constraint) is not None


def _least_that_fits(look: Callable[[float], Search], limit: float) -> tuple[Evaluated, ...]:
    """Return a plan for a limit of memory hardly larger than the least that has one; none where that is very large.

    The limit is doubled until something fits, then bisected geometrically. `look` searches within a limit.
    """
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


def _nothing(
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
