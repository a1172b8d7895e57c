"""Find the fastest plan for a graph on a described cluster, with a proof of how good it is: the planner's entry.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster, show_bytes
from nnscaler.planning.constraints import Constraint
from nnscaler.planning.context_and_expert_parallel import contexts
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.branch_and_bound import NOTHING, Known, Search, ranking, search
from nnscaler.planning.planner.build_certified_plan import Certificate, certificate, plan_of
from nnscaler.planning.planner.evaluate_configuration import Evaluated, cuts_of
from nnscaler.planning.planner.explain_no_plan import explain_no_choice, explain_nothing_found
from nnscaler.planning.planner.planner_graph import FREE, PlanningCache
from nnscaler.planning.sharding.parameter_and_activation_memory import CLUSTERS_MEMORY, MemoryBudget, bytes_of_optimizer
from nnscaler.planning.solver.problem import Infeasible
from nnscaler.transform.balanced_cuts_at_module_borders import describe_modules
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import DP, Plan
from nnscaler.without_garbage_collection import without_garbage_collection

INFINITE = float("inf")
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
        again = len(self.best.again.layers.intersection(range(first - 1, last - 1)))
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
    limit = float(cluster.device.memory if memory.limit is None else memory.limit)

    def space_of(cp: int) -> _Space:
        subject = PlanningCache(graph, signatures, priced, kept, optimizer, cp)
        return _Space(subject, cluster, constraint, progress)

    def permitted(cp: int) -> bool:
        return any(map(kept.permits, space_of(cp).subject.space(cluster.devices)))

    with without_garbage_collection():
        spaces = [space_of(cp) for cp in contexts(graph, signatures, cluster.devices, permitted)]
        finer = [(space, space.subject.cut_within_layers()) for space in spaces]
        spaces += [replace(space, subject=cut) for space, cut in finer if cut is not None]
        tried: list[tuple[_Space, Search | NnscalerError]] = []
        known = NOTHING
        for space in spaces:
            try:  # whole layers are easier to read: cuts within them have to save some of what is known
                found = space.look(limit, progress, known if space.subject.within_layers else NOTHING)
            except NnscalerError as error:
                if error.code not in ("plan_too_large", "plan_illegal"):
                    raise
                tried.append((space, error))
                continue
            tried.append((space, found))
            seconds = INFINITE if found.best is None else found.best.seconds
            known = Known(min(known.seconds, seconds), min(known.bound, found.bound))
        if known.seconds == INFINITE:
            raise _why_nothing(tried, limit)
        return _fastest([(space, found) for space, found in tried if isinstance(found, Search)], limit)


def _why_nothing(tried: Sequence[tuple[_Space, Search | NnscalerError]], limit: float) -> NnscalerError:
    """Return the error where no search found a plan: what the first one says in which anything is permitted."""
    asked = (one for one in tried if isinstance(one[1], NnscalerError) or one[1].solved or one[1].too_large)
    space, found = next(asked, tried[0])
    return found if isinstance(found, NnscalerError) else space.why_nothing(found, limit)


def _fastest(searched: Sequence[tuple[_Space, Search]], limit: float) -> Found:
    """Return the fastest plan found, certified within all that was searched: no plan of any is below the least bound.

    Raises NnscalerError("plan_illegal") where the graph cannot be cut so for any of the searches.
    """
    every = [found for _, found in searched]
    ranked = sorted(
        ((s, found.best) for s, found in searched if found.best is not None), key=lambda one: one[1].seconds
    )
    refused: list[NnscalerError] = []
    for space, best in ranked:
        try:
            plan = plan_of(space.subject, best)
        except NnscalerError as error:
            if error.code != "plan_illegal":
                raise
            refused.append(error)
            continue
        whole = Search(
            best,
            tuple(sorted((one for found in every for one in found.solved), key=ranking)),
            min(best.seconds, *(found.bound for found in every)),
            sum(found.left for found in every),
            sum(found.too_large for found in every),
            min(found.least for found in every),
        )
        return Found(plan, certificate(space.subject, whole, space.cluster.name, limit), space.subject, whole)
    raise refused[0]


@dataclass(frozen=True)
class _Space:
    """The plans that one search goes through: those of one number of ranks for a sequence, with pipelines that are cut
    between layers, or within them.

    refusals   by dp and micro-batches, why the batch cannot be cut so; None: it can
    """

    subject: PlanningCache
    cluster: Cluster
    constraint: Constraint | None
    progress: Callable[[str], None]
    refusals: dict[tuple[int, int], str | None] = field(default_factory=dict)

    def look(self, limit: float, progress: Callable[[str], None], known: Known = NOTHING) -> Search:
        """Search within so many bytes of a rank. `known`: what searches of other parts of the space found.

        Raises NnscalerError("plan_illegal") where the constraints leave an operation no choice.
        """
        subject, ranks = self.subject, self.cluster.devices
        try:
            return search(subject, ranks, limit, self._allowed, progress, self._impossible, known)
        except (Infeasible, NnscalerError) as error:
            raise explain_no_choice(subject, self.constraint, self.cluster, error) from None

    def why_nothing(self, found: Search, limit: float) -> NnscalerError:
        """Return the error for a search that found no plan within `limit` bytes."""
        if found.too_large and not found.solved and found.least <= limit:
            self.progress(f"nothing fits into {show_bytes(limit)}: looking for the least memory that does")
            least = _least_that_fits(lambda most: self.look(most, lambda _: None), limit)
            found = replace(found, solved=least)
        refused = next((reason for reason in self.refusals.values() if reason is not None), None)
        return explain_nothing_found(self.subject, found, self.cluster, limit, self.constraint, refused)

    def _allowed(self, c: Configuration) -> bool:
        kept = self.subject.constraint
        if c.chunks > 1 and (kept.at or kept.together):
            return False  # they speak of devices with one stage
        return self.constraint is None or (self.constraint.permits(c) and _may_be_cut(self.subject, c))

    def _impossible(self, c: Configuration) -> bool:
        key = (c.dp, c.micro_batches)
        if key not in self.refusals:
            self.refusals[key] = refused = _refused(self.subject, c)
            if refused is not None:
                self.progress(f"{c}: {refused}")
        return self.refusals[key] is not None


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
