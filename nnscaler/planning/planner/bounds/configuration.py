"""Lower bounds of a configuration under a limit of memory, without solving it for all of its layers.

For a chain of equal layers the bounds are those of `bounds/equal_layer_pipeline.py`. For any other graph:

Stage s of p keeps up to live_s micro-batches (1F1B: min(m, p - s) of m). Of equal layers that rest in r bytes and keep
k bytes of a micro-batch, at most sum_s memory / (r + live_s k) fit, however they are cut. The sum is convex in (r, k):
so whatever lets L layers fit lies below the chord through the ends of the curve, r L / (p memory) + k L / (H memory) <=
1, with H = sum_s 1 / live_s. Under this linear limit, the fastest choices for a window of the layers have a Lagrangian
bound. Of unequal layers, each counts as kept once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from nnscaler.errors import NnscalerError
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.bounds.equal_layer_pipeline import Layered
from nnscaler.planning.planner.equal_layer_chain import Chain
from nnscaler.planning.planner.estimate_stages import send_seconds
from nnscaler.planning.planner.evaluate_configuration import weights_of
from nnscaler.planning.planner.planner_graph import PlanningCache
from nnscaler.planning.planner.prune_dominated import Numbers
from nnscaler.planning.sharding.build_problem import pose
from nnscaler.planning.sharding.cost_tables import when_backward_ends
from nnscaler.planning.sharding.zero_stages import Rates
from nnscaler.planning.solver.fold_equal_layers import min_marginal
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Node, Table, TooWide, memory_floor
from nnscaler.planning.solver.sweep_memory_price import ROUNDING
from nnscaler.transform.plan import DP

# The Lagrangian bound under a budget at many prices of memory at once.
# The price is one more node, with an edge to every other one, and the bound follows from the best value with it
# fixed to each of its strategies. Equal layers are folded as they are at a single price: the price is a hub of
# theirs.

LOW, HIGH, COUNT = 1 / 64, 64.0, 12  # of the prices, in prices at which the budget costs what the fastest nodes do


def bound_by_prices(problem: ChoiceProblem, budget: float) -> float:
    """Return a lower bound of the value of every choice within `budget`; +inf where it is clear that there is none.

    It may lie below the best Lagrangian bound, which has a price between these. Raises `TooWide`.
    """
    if memory_floor(problem) > budget:
        return inf
    base = sum(float(node.cost.min()) for node in problem.nodes) / max(budget, 1.0)
    # [prices]: 0, and geometric steps about the price at which the budget costs as much as the fastest nodes
    prices = np.append(0.0, base * np.geomspace(LOW, HIGH, COUNT)) if 0.0 < base < inf else np.zeros(1)
    number = len(problem.nodes)  # of the price as a node
    shared: dict[int, Table] = {}
    edges = list(problem.edges)
    for index, node in enumerate(problem.nodes):
        if node.memory is not None:
            if id(node.memory) not in shared:
                shared[id(node.memory)] = node.memory[:, None] * prices
            edges.append(Edge(index, number, shared[id(node.memory)]))
    values = min_marginal(ChoiceProblem((*problem.nodes, Node("price", np.zeros(len(prices)))), tuple(edges)), number)
    # [prices]: `values` are the least priced values; less the price of the whole budget, each is a bound
    rounding = ROUNDING * (np.abs(values) + prices * abs(budget))
    return float((values - prices * budget - rounding).max())


def layered_of(subject: PlanningCache, c: Configuration, memory: float) -> tuple[Layered, ...]:
    """Return the chain in this configuration, for each moment at which a rank may hold most; none where the graph is
    no chain."""
    chain = subject.chain(c.tp, c.parts, c.rests)
    if chain is None:
        return ()
    if (c, memory) not in subject.layered:
        sent = _sent(subject, c, chain.handed)
        early = Layered(chain, len(subject.layers), c, weights_of(subject, c), memory, sent)
        subject.layered[c, memory] = tuple(
            replace(early, chain=_with_ends(chain.when_backward_ends() if late else chain, c, late), late=late)
            for late in c.parameters.moments
        )
    return subject.layered[c, memory]


def _with_ends(chain: Chain, c: Configuration, late: bool) -> Chain:
    """Return the chain in which what the first and the last stage keep outside of layers counts as often as there are
    passes of them, for one micro-batch of their devices' layers."""
    if c.chunks == 1:
        return chain
    devices = (c.stage_devices[0], c.stage_devices[-1])
    lives = [c.live(device) - late for device in devices]
    head, tail = ((n - late) / live if live else 0.0 for n, live in zip(c.at_ends, lives, strict=True))
    return chain.with_kept_outside(head, tail)


def _sent(subject: PlanningCache, c: Configuration, sizes: Sequence[float]) -> Numbers:
    """Return, for each of these sizes in bytes, the seconds in which a stage hands so much on: [sizes]."""
    return np.array([send_seconds(subject.cost, c, size) if c.pp > 1 else 0.0 for size in sizes])


def rough_bound(subject: PlanningCache, c: Configuration, memory: float, parts: int = 1) -> float:
    """Bound the seconds of a step in which all ranks have `memory` bytes, from the shapes of one of `parts` of the
    batch.

    Infinite where nothing fits, 0 where the graph is no chain, and where ranks divide experts: those read and sum less.
    """
    if c.ep > 1:
        return 0.0
    rough = subject.rough(c.tp, parts, c.chunks > 1)  # with several stages fewer passes of the ends are alive
    if rough is None:
        return 0.0
    sent = _sent(subject, c, [size * parts / c.parts for size in rough.chain.handed])
    each = gathering(subject, c, len(subject.layers) // 2)
    rates, uncut = summing_rates(subject, c), subject.parameters_by_layer.uncut(c.dp)
    return rough.bound(c, memory, rates, uncut, each, sent, subject.shrinks(c.rests))


def summing_rates(subject: PlanningCache, c: Configuration) -> Rates:
    """Return lower bounds of the seconds per byte of gradients that are summed over dp, in which buckets bring them,
    and their parameters, to where they rest; 0 where none need be."""
    if c.dp == 1:
        return Rates(0.0, 0.0, 0.0)
    return c.parameters.rates(subject.cost, c.places[DP], c.micro_batches, subject.values)


def gathering(subject: PlanningCache, c: Configuration, layer: int | None = None) -> float:
    """Return a lower bound of the seconds in which a micro-batch gathers parameters and scatters their gradients.

    `layer` restricts it to the parameters of that layer. 0 where they rest as they are read.
    """
    if not c.parameters.each:
        return 0.0
    key = c.parameters, c.places[DP], c.tp, layer
    if key not in subject.gathering:
        of_each = (
            (c.parameters.least_seconds(subject.cost, key[1], t, c.tp, back), n)
            for t, back, n in subject.parameters_by_layer.gathered(c.dp, layer)
        )
        subject.gathering[key] = sum(seconds * count for seconds, count in of_each)
    return subject.gathering[key]


def near_bound(subject: PlanningCache, c: Configuration, memory: float) -> float:
    """Bound the seconds of a step from the shapes of the configuration's own micro-batches.

    Where the graph is no chain, or ranks divide experts, the bound holds whatever the memory is.
    """
    if c.ep > 1:
        try:
            return c.each * subject.fastest(c.tp, c.parts, ep=c.ep)
        except NnscalerError as error:  # beside divided experts, the constraints leave an operation no choice on tp
            if error.code != "plan_illegal":
                raise
            return inf
    if subject.chain(c.tp, c.parts) is None:
        times = c.each if c.passes is None else 1.0
        return times * subject.fastest(c.tp, c.parts, c.passes) + c.each * gathering(subject, c)
    return rough_bound(subject, c, memory, c.parts)


def coarse_bound(subject: PlanningCache, c: Configuration, memory: float) -> float:
    """Bound the seconds of a step within `memory` by Lagrangian relaxation with few prices; 0 where the graph is no
    chain."""
    return max((one.coarse.value for one in layered_of(subject, c, memory)), default=0.0)


def bound_within(subject: PlanningCache, c: Configuration, memory: float) -> float:
    """Bound the seconds of a step within `memory` by Lagrangian relaxation with prices about those that bind.

    0 where the tables would be too wide, and the bound says nothing.
    """
    layered = layered_of(subject, c, memory)
    if layered:
        return max(one.bound.value for one in layered)
    alike = subject.repeated_on(c.tp) is not None or c.pp == 1
    tables = subject.tables(c.tp, c.parts, c.rests, short=True)
    found = 0.0
    for late in c.parameters.moments:
        lives = [c.live(s) - late for s in range(c.pp)] if alike else [1 - late]
        live = len(lives) / sum(1 / live for live in lives) if all(lives) else 0.0
        held = when_backward_ends(tables) if late else tables
        problem = pose(held, replace(weights_of(subject, c), live=live), subject.window(c.tp), layers_only=c.pp > 1)
        try:
            found = max(found, bound_by_prices(problem, memory * c.pp))
        except TooWide:
            return found
    return found
