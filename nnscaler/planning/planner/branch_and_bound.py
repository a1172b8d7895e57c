"""Branch and bound over configurations (Land and Doig 1960), best first: the one with the least bound is looked at
next.

A configuration has a first bound: one micro-batch takes at least as long as the fastest choices for its tp take for the
whole batch, divided by the parts of the batch. (Smaller micro-batches start more kernels, read the parameters more
often, and have the same arithmetic.) When that is the least bound of all, it is replaced by a second one, from the
fastest choices for its own size of micro-batches that may fit into memory, and then by a finer one. When that still is
the least, the configuration is solved. Where no configuration that is left can be much better, bounds alone are
computed, as long as they still make the least one larger. The search returns that too: the least bound of all
configurations that are not proved to be slower. A worked example is in `find_plan`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from nnscaler.errors import NnscalerError
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.bounds.configuration import (
    bound_within,
    coarse_bound,
    gathering,
    layered_of,
    near_bound,
    rough_bound,
    summing_rates,
)
from nnscaler.planning.planner.bounds.equal_layer_pipeline import Layered
from nnscaler.planning.planner.bounds.lagrangian import Prices
from nnscaler.planning.planner.bounds.rough_equal_layer_pipeline import Least
from nnscaler.planning.planner.equal_layer_chain import Chain
from nnscaler.planning.planner.estimate_stages import ComputedAgain
from nnscaler.planning.planner.evaluate_configuration import (
    Evaluated,
    beside,
    by_device,
    evaluate,
    evaluated,
    weights_of,
)
from nnscaler.planning.planner.layer_time_memory_tradeoffs import Way
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.planner.stage_partition_dp import StagePartition
from nnscaler.planning.planner.stage_strategy_mix import StageFill, fill
from nnscaler.planning.sharding.cost_tables import Tables
from nnscaler.planning.sharding.zero_stages import AT_REST_WHOLE
from nnscaler.planning.solver.problem import Infeasible

# Turn the stages of a filled pipeline into a choice for every operation.

TRIES = 5  # limits of memory that are tried


def evaluate_chain(subject: PlanningCache, c: Configuration, memory: float) -> Evaluated | None:
    """Return the fastest choices found that fit into `memory` bytes, or the last ones tried; None where none are found.

    The graph must be a chain. Where the real stages of a device need more than the fill assumed, its limit is lowered
    by that much and the fill is tried again, up to `TRIES` times.
    """
    every = layered_of(subject, c, memory)
    assert every
    found: list[Evaluated] = []
    for layered in every:
        proved = layered.bound
        if proved.cut is None:
            return None
        found += _filled(subject, layered, proved.prices, proved.cut)
    bound = max(layered.bound.value for layered in every)
    best = min(found, key=lambda one: (not one.fits, one.seconds), default=None)
    return None if best is None else replace(best, bound=bound)


def _filled(subject: PlanningCache, layered: Layered, prices: Prices, cut: StagePartition) -> Iterator[Evaluated]:
    """Yield the choices that fill the memory of one moment, with lower limits on devices that really need more."""
    c = layered.configuration
    limits = [layered.memory] * c.pp
    for _ in range(TRIES):
        over = [0.0] * c.pp
        for stages in fill(layered, prices, cut, limits):
            found = _placed(subject, layered, stages)
            held = by_device(c, [stage.memory for stage in found.stages])
            over = [max(most, own - layered.memory) for most, own in zip(over, held, strict=True)]
            yield replace(found, fits=found.memory <= layered.memory)
        if not any(over):
            break
        limits = [limit - more * 1.01 for limit, more in zip(limits, over, strict=True)]


def _placed(subject: PlanningCache, layered: Layered, stages: Sequence[StageFill]) -> Evaluated:
    """Evaluate a fill on the tables of the whole graph."""
    c = layered.configuration
    tables = subject.tables(c.tp, c.parts, c.rests)
    places = _places(tables, layered.chain, layered.layers)
    choices = [0] * len(tables.names)
    again: set[int] = set()
    by_stage = _by_stage(c, stages)
    for layer, way in enumerate(way for stage in by_stage for way in stage):
        for node, choice in way.choices.items():
            choices[places[layer][node]] = int(layered.chain.kept[node][choice])
        if way.again:
            again.add(layer)
    edges = [0, *(1 + end for end in accumulate(len(stage) for stage in by_stage[:-1])), layered.layers + 2]
    found = evaluated(subject, c, tables, weights_of(subject, c), choices, ComputedAgain(frozenset(again)), edges)
    prices = [c.each * fill.price(stage.live) for fill, stage in zip(stages, layered.stages, strict=True)]
    priced = zip(found.stages, c.stage_devices, strict=True)
    return replace(found, stages=tuple(replace(stage, price=prices[device]) for stage, device in priced))


def _by_stage(c: Configuration, fills: Sequence[StageFill]) -> list[list[Way]]:
    """Return the ways of the layers of each stage; `fills` has those of each device."""
    chunks = [iter(fill.in_chunks(c.chunks)) for fill in fills]
    return [next(chunks[device]) for device in c.stage_devices]


def _places(tables: Tables, chain: Chain, layers: int) -> list[dict[int, int]]:
    """Return, for every layer, where the nodes of its piece lie in the tables of the whole graph: chain node ->
    index."""
    # a tensor may be called as its operation
    operations = len(tables.strategies)
    index = {(name, i < operations): i for i, name in enumerate(tables.names)}
    short = len(chain.tables.strategies)

    def same(nodes: Sequence[int]) -> dict[int, int]:
        return {node: index[chain.tables.names[node], node < short] for node in nodes}

    inside: list[list[int]] = [[] for _ in range(layers)]
    for node, group in enumerate(tables.groups):
        if group >= 0:
            inside[group].append(node)
    middle = [dict(zip(chain.layer.nodes, nodes, strict=True)) for nodes in inside[1:-1]]
    return [same(chain.head.nodes), *middle, same(chain.tail.nodes)]


WHOLE = (rough_bound,)  # from the chain of the whole batch, where parameters rest whole
SHAPES = (*WHOLE, near_bound)  # bounds that do not ask how parameters rest
BOUNDS = (*SHAPES, coarse_bound, bound_within)  # of a configuration, before it is solved
CLOSE = 0.005  # a search ends when what is left can save less than this share
Entry = tuple[float, int, tuple[int, ...], Configuration]  # bound, how often it was improved, order among equals


@dataclass(frozen=True)
class Known:
    """The best plan and the bound that searches of other parts of the space found.

    seconds  of a step with their best plan
    bound    seconds of a step that no plan of theirs goes below
    """

    seconds: float = float("inf")
    bound: float = float("inf")


NOTHING = Known()


@dataclass(frozen=True)
class Search:
    """The result of a search.

    best        the fastest configuration that fits, None where none was found
    solved      all configurations that were solved, fastest first
    bound       seconds of a step that no plan in the space goes below
    left        how many configurations were not solved, since they cannot be much better
    too_large   in how many configurations nothing fits, or nothing was found to fit
    least       bytes at rest on some rank that no configuration goes below
    """

    best: Evaluated | None
    solved: tuple[Evaluated, ...]
    bound: float
    left: int
    too_large: int
    least: float

    @property
    def gap(self) -> float:
        """The share of its own time by which the best plan may be slower than the optimum of the space."""
        assert self.best is not None
        return max(0.0, 1 - self.bound / self.best.seconds)


def search(
    subject: PlanningCache,
    ranks: int,
    memory: float,
    permitted: Callable[[Configuration], bool] = lambda _: True,
    progress: Callable[[str], None] = lambda _: None,
    impossible: Callable[[Configuration], bool] = lambda _: False,
    known: Known = NOTHING,
) -> Search:
    """Return the best configuration of `ranks`, each with `memory` bytes, among those permitted.

    `impossible` says whether a configuration has no program. It takes time, and is asked only before one is solved.
    The search ends where nothing that is left can save a share of `CLOSE` of the best plan, found or `known`, and no
    cheap bound of it can make what is proved of all, `known` included, any better.

    Raises NnscalerError("plan_illegal") where an operation has no choice that is allowed, whatever tp is, and
    Infeasible where no choices go together.
    """
    queue, too_large, resting = _queued(subject, ranks, memory, permitted)
    best: Evaluated | None = None
    solved: list[Evaluated] = []
    undecided, below = float("inf"), known.seconds * (1 - CLOSE)
    most = min(known.seconds, known.bound)  # that can be proved of all
    while queue:
        bound, depth, order, c = heapq.heappop(queue)
        if bound >= below and bound >= min(most, undecided):
            return _result(best, solved, min(undecided, bound), len(queue) + 1, too_large, resting)
        if depth and c.recompute is None and not _chained(subject, c, depth):  # layers are not told apart
            for again in (False, True):
                one = replace(c, recompute=again)
                heapq.heappush(queue, (bound, 0, one.order, one))
            continue
        if depth < len(BOUNDS):
            within = BOUNDS[depth](subject, c, memory) + beside(subject, c)
            if within < float("inf"):
                heapq.heappush(queue, (max(bound, within), depth + 1, order, c))
            else:
                too_large += 1
            continue
        if impossible(c):
            continue
        if bound >= below:  # solving it saves too little, and its bound is the least
            return _result(best, solved, min(undecided, bound), len(queue) + 1, too_large, resting)
        chained = _chained(subject, c, depth)
        found = evaluate_chain(subject, c, memory) if chained else evaluate(subject, c, memory)
        if found is None:
            too_large += 1
            undecided = min(undecided, bound) if chained else undecided  # none was found, which proves nothing
            continue
        found = replace(found, bound=found.bound + beside(subject, c))
        solved.append(found)
        undecided = min(undecided, max(bound, found.bound))
        if found.fits and found.seconds < (below if best is None else best.seconds):
            best, below, most = found, found.seconds * (1 - CLOSE), min(most, found.seconds)
            progress(f"{found}: {found.seconds:.4g} s a step")
    return _result(best, solved, undecided, 0, too_large, resting)


def _chained(subject: PlanningCache, c: Configuration, depth: int) -> bool:
    """Return whether the graph is a chain for the next bound of a configuration: the first ones ask it of the whole
    batch, and of parameters that rest whole."""
    parts = 1 if depth < len(WHOLE) else c.parts
    rests = AT_REST_WHOLE if depth < len(SHAPES) else c.rests
    return subject.chain(c.tp, parts, rests) is not None


def _queued(
    subject: PlanningCache, ranks: int, memory: float, permitted: Callable[[Configuration], bool]
) -> tuple[list[Entry], int, float]:
    """Return the configurations that may fit, as a heap by their first bounds.

    Also returns how many cannot fit, and a lower bound of the bytes at rest on some rank. Where layers can be
    recomputed one by one (`recompute` None), the configurations that recompute all of them or none are contained in
    that one, and left out.
    """
    queue: list[Entry] = []
    too_large = 0
    resting = float("inf")
    refused: dict[int, NnscalerError | Infeasible] = {}
    contained: set[Configuration] = set()
    for c in subject.space(ranks, each=subject.repeated is not None):
        if c in contained or c.tp in refused or not permitted(c):
            continue
        try:
            least = subject.least(c.tp)
        except (NnscalerError, Infeasible) as error:
            refused[c.tp] = error
            continue
        if c.recompute is None:
            if subject.chain(c.tp, 1) is None:
                continue
            contained.update((replace(c, recompute=False), replace(c, recompute=True)))
        resting = min(resting, least.resting / c.pp / subject.shrinks(c.rests))
        if may_fit(subject, least, c, memory):
            queue.append((_bound(subject, least, c), 0, c.order, c))
        else:
            too_large += 1
    if refused and not queue and not too_large:
        raise next(iter(refused.values()))
    heapq.heapify(queue)
    return queue, too_large, resting


def ranking(one: Evaluated) -> tuple[bool, float, tuple[int, ...]]:
    """Return the key by which configurations are ranked: those that fit first, the fastest of them first."""
    return not one.fits, one.seconds, one.configuration.order


def _result(
    best: Evaluated | None, solved: Iterable[Evaluated], bound: float, left: int, too_large: int, least: float
) -> Search:
    ranked = tuple(sorted(solved, key=ranking))
    return Search(best, ranked, min(bound, best.seconds) if best is not None else bound, left, too_large, least)


def may_fit(subject: PlanningCache, least: Least, c: Configuration, memory: float) -> bool:
    """Return whether the memory floor of a configuration is within the limit, however the layers are cut into stages.

    The floor counts what rests, and what each layer keeps of one micro-batch. It is compared over all `pp` devices
    together.
    """
    kept = (least.kept if c.recompute is False else least.handed) / c.parts / c.ep
    return all(
        least.resting / subject.shrinks(c.rests, late) + (0.0 if late else kept) <= memory * c.pp
        for late in c.parameters.moments
    )


def _bound(subject: PlanningCache, least: Least, c: Configuration) -> float:
    """Return the first lower bound of a configuration, in seconds of a step; 0 where ranks divide experts."""
    if c.ep > 1:
        return 0.0
    once = least.seconds + (least.again if c.recompute else 0.0)
    ramps = [max(f, i) for f, i, w in c.ramps if w >= 0.0]
    more = max(0.0, *(often - c.ramp for often in ramps)) * least.again / c.parts if ramps else 0.0
    return (
        c.each * (once / c.parts + gathering(subject, c)) + more + summing_rates(subject, c).least * least.summed / c.pp
    )
