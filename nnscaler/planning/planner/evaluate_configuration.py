"""Evaluate one configuration: its best choices, its stages, and their time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.constraints.kinds import Constraint
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.interlaced_end_costs import ends_of
from nnscaler.planning.planner.planner_graph import EndsEstimate, PlanningCache
from nnscaler.planning.sharding.build_problem import Weights, once_at, pose
from nnscaler.planning.sharding.cost_tables import Tables, when_backward_ends
from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Solution, TooWide, memory_floor, memory_of
from nnscaler.planning.solver.solve import solve, solve_within
from nnscaler.planning.solver.sweep_memory_price import bound_at, hull
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts, cut_limits
from nnscaler.transform.partition_stages import SLACK
from nnscaler.transform.plan import CP, DP, EP, PP, TP

# Cut a pipeline between layers, as evenly as their times allow and where the constraints leave it.


def cuts_of(
    items: Mapping[str, int],
    costs: Sequence[float],
    devices: int,
    kept: Constraint | None,
    crossing: Sequence[float] | None = None,
    slack: float = SLACK,
) -> tuple[int, ...] | None:
    """Return the items before which the stages of `devices` begin; None where there is no such cut.

    Operations before the layers (item 0) stay with the first layer, those after them with the last.

    items      by operation, its item
    costs      by item, its seconds
    crossing   by item, what a cut before it sends: the least of it is taken that `slack` of the seconds allows; None:
               balance alone decides
    """
    joined = [sorted(items[name] for name in group) for group in (kept.together if kept else ())]
    places = [(items[name], device) for name, device in (kept.at if kept else ())]
    between = [at for at in range(2, len(costs) - 1) if not any(group[0] < at <= group[-1] for group in joined)]
    limits = cut_limits(devices, len(costs), places)
    weights, most = ([0] * len(between), 0.0) if crossing is None else ([round(crossing[at]) for at in between], slack)
    return None if limits is None else balanced_cuts(costs, between, between, weights, devices, limits, most)


TRIES = 3  # budgets of memory that are tried
POINTS = 12  # of the hull of time and memory
WIDE_SECONDS = 10.0  # of an integer program, where tables would be too wide
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage of the pipeline.

    items      the first item of the stage, and the one after its last
    forward    seconds of one micro-batch
    backward   seconds of one micro-batch, recomputation included
    weights    those of them that the second half of a backward, W, takes
    once       seconds once per step
    resting    bytes of parameters, gradients and optimizer states
    kept       bytes of activations of all live micro-batches
    arriving   bytes of gradients that are whole when a backward ends, above those of activations that are gone then
    price      seconds of a step that one more byte of memory would save
    """

    items: tuple[int, int]
    forward: float
    backward: float
    weights: float
    once: float
    resting: float
    kept: float
    arriving: float = 0.0
    price: float = 0.0

    @property
    def memory(self) -> float:
        return self.resting + self.kept + self.arriving


@dataclass(frozen=True)
class Evaluated:
    """A configuration with choices for it.

    seconds   of one step
    bound     seconds of a step that no choices in this configuration go below
    fits      whether its memory is within the limit
    choices   by node of the tables, the number of its strategy
    again     the layers that are recomputed in backward
    tables    the cost tables that the choices refer to
    weights   how the parts of a step count
    stages    one entry per stage
    """

    configuration: Configuration
    seconds: float
    bound: float
    fits: bool
    choices: tuple[int, ...]
    again: frozenset[int]
    tables: Tables
    weights: Weights
    stages: tuple[StageEstimate, ...]

    def __str__(self) -> str:
        some = self.configuration.recompute is None and bool(self.again)
        return f"{self.configuration}, recompute {len(self.again)} layers" if some else str(self.configuration)

    @property
    def memory(self) -> float:
        """Bytes of the rank that holds most."""
        return max(by_device(self.configuration, [stage.memory for stage in self.stages]))


def by_device(c: Configuration, values: Sequence[float]) -> list[float]:
    """Return, by pipeline device, the sum of `values` of its stages."""
    found = [0.0] * c.pp
    for device, value in zip(c.stage_devices, values, strict=True):
        found[device] += value
    return found


def weights_of(subject: PlanningCache, c: Configuration) -> Weights:
    """Return how often the parts of a step count in a configuration."""
    sizes = {DP: c.dp // c.ep, CP: c.cp, TP: c.tp}
    rates = {axis: seconds_per_byte(subject.cost, c.places[axis]) for axis, size in sizes.items() if size > 1}
    if c.ep > 1:  # what is no expert's is summed over dp and ep at once
        rates[EP] = max(0.0, seconds_per_byte(subject.cost, c.sharing) - rates.get(DP, 0.0))
    return Weights(c.each, 1 / c.pp, rates, c.live(0), c.recompute is True, c.passes)


def evaluate(subject: PlanningCache, c: Configuration, memory: float) -> Evaluated | None:
    """Return the fastest choices that fit into `memory` bytes, or, where none is found, the last ones tried.

    None where it is proved that nothing fits. All layers are recomputed, or none. The budget of the problem is that of
    a rank that runs the whole graph; it is lowered until the largest stage fits.
    """
    tables = subject.tables(c.tp, c.parts, c.rests)
    weights = weights_of(subject, c)
    solution = solve(pose(tables, weights))
    free = _with(subject, c, tables, weights, solution, memory)
    if free.memory <= memory:
        return free
    found: list[Evaluated] = []
    for late in c.parameters.moments:
        held = when_backward_ends(tables) if late else tables
        problem = pose(held, replace(weights, live=weights.live - late))
        within = _within(subject, free, problem, solution, memory)
        if within is None:
            return None
        found.append(within)
    best = min(found, key=lambda one: (not one.fits, one.seconds))
    return replace(best, bound=max(one.bound for one in found))


def _within(
    subject: PlanningCache, free: Evaluated, problem: ChoiceProblem, solution: Solution, memory: float
) -> Evaluated | None:
    """Return the fastest choices whose largest stage fits into `memory` bytes, or the last ones tried; None where it is
    proved that nothing fits.

    `problem` has the memory of one moment; `free` is its `solution` without a limit.
    """
    c = free.configuration
    if c.pp == 1 and memory_floor(problem) > memory:
        return None
    try:
        swept = hull(problem, POINTS)
    except TooWide:  # no table for every price: the front door alone, which takes longer
        swept = None
    bound = max(solution.bound, bound_at(swept, memory)) if c.pp == 1 and swept is not None else solution.bound
    if bound == np.inf:
        return None
    found = free
    budget = memory_of(problem, solution.choices)
    for _ in range(TRIES):
        budget *= memory / found.memory * 0.995
        try:
            within = (
                solve(problem, budget, WIDE_SECONDS)
                if swept is None
                else solve_within(problem, budget, swept, seconds=0.0)
            )
        except Infeasible:
            break
        found = _with(subject, c, free.tables, free.weights, within, memory)
        budget = memory_of(problem, found.choices)
        if found.memory <= memory:
            break
    return replace(found, bound=bound, fits=found.memory <= memory)


def _with(
    subject: PlanningCache, c: Configuration, tables: Tables, weights: Weights, solution: Solution, memory: float
) -> Evaluated:
    """Evaluate a solution with its stages cut so that they are balanced, and so that they fit into `memory` bytes if
    they can."""
    again = frozenset(range(len(subject.layers))) if c.recompute else frozenset[int]()
    numbers = item_numbers(subject, tables, weights, solution.choices, again)
    count = len(numbers["forward"])
    crossing = None
    if subject.blocks:  # a cut before item i + 1 is one before block i
        crossing = [0.0, *(sent * b.weight for sent, b in zip(numbers["sent"], subject.blocks, strict=False)), 0.0]
    count_of, times = c.pp * c.chunks, list(numbers["forward"] + numbers["backward"])
    every = []
    for slack in (SLACK, 0.0) if crossing and c.pp > 1 else (SLACK,):
        cuts = cuts_of(subject.items, times, count_of, subject.constraint, crossing, slack)
        assert cuts is not None, c
        every.append(evaluated(subject, c, tables, weights, solution.choices, again, (0, *cuts, count)))
    found = min(every, key=lambda one: (one.memory > memory, one.seconds))
    prices = (solution.multiplier,) * count_of
    stages = tuple(replace(stage, price=price) for stage, price in zip(found.stages, prices, strict=True))
    return replace(found, bound=solution.bound, stages=stages)


def evaluated(
    subject: PlanningCache,
    c: Configuration,
    tables: Tables,
    weights: Weights,
    choices: Sequence[int],
    again: frozenset[int],
    edges: Sequence[int],
) -> Evaluated:
    """Return time and memory of a step with these choices, with the pipeline cut at these items.

    A step takes what the schedule makes of the stages' seconds, and the largest of what stages do once per step.
    """
    numbers = item_numbers(subject, tables, weights, choices, again)
    devices, ends = c.stage_devices, ends_of(subject, c)
    count = len(devices)
    stages = tuple(_with_ends(_stage(c, numbers, again, s, edges[s], edges[s + 1]), ends) for s in range(count))
    sent = [0.0, *(send_seconds(subject.cost, c, float(numbers["sent"][end - 1])) for end in edges[1:-1]), 0.0]
    sent = [time if 0 < s < count and devices[s - 1] != devices[s] else 0.0 for s, time in enumerate(sent)]
    # [stages]: seconds of half of what a stage sends and receives, forward and backward
    mail = [(before + after) / 2 for before, after in pairwise(sent)]
    ahead = by_device(c, [s.forward + time for s, time in zip(stages, mail, strict=True)])
    inputs = by_device(c, [s.backward - s.weights + time for s, time in zip(stages, mail, strict=True)])
    later = by_device(c, [s.weights for s in stages])
    # [devices]: how many times longer a backward takes in the mean, of which some run in halves
    shares = [min(1.0, c.figures.in_halves(device, c.chunks) / c.micro_batches) for device in range(c.pp)]
    longer = [1.0 + (subject.cost.overheads.halved - 1.0) * share for share in shares]
    passes = [(f, more * i, more * w) for f, i, w, more in zip(ahead, inputs, later, longer, strict=True)]
    once = max(by_device(c, [stage.once for stage in stages]))
    step = c.figures.step_seconds(passes, c.micro_batches, c.chunks) + once + beside(subject, c)
    return Evaluated(c, step, 0.0, True, tuple(choices), again, tables, weights, stages)


def beside(subject: PlanningCache, c: Configuration) -> float:
    """Return the seconds of a step in which all devices of a pipeline run its shared ends."""
    ends = ends_of(subject, c)
    return c.micro_batches * ends.seconds + ends.once


def _with_ends(stage: StageEstimate, ends: EndsEstimate) -> StageEstimate:
    """Return a stage with the bytes of the shared ends, which each device holds besides."""
    return replace(stage, resting=stage.resting + ends.resting, kept=stage.kept + ends.kept)


def item_numbers(
    subject: PlanningCache, tables: Tables, weights: Weights, choices: Sequence[int], again: frozenset[int]
) -> Mapping[str, Numbers]:
    """Add up the tables per item (before the layers, every layer, after them); each entry is [items].

    forward, backward   seconds of one micro-batch
    weights             those of `backward` that W takes
    once                seconds once per step
    resting             bytes at rest
    kept, outside       bytes that one micro-batch keeps in its layer, and outside of layers
    gathered            bytes of parameters that are whole while a layer runs again
    handed              bytes that one micro-batch hands on
    sent                bytes of one micro-batch that a cut after the item has to send: what it hands on; in a model
                        without numbered layers, where what skips some items is usual, all that is read after it
    arriving            bytes of gradients that are whole when a backward ends
    """
    count = len(subject.layers) + 2
    names = ("forward", "backward", "weights", "once", "resting", "kept", "outside", "gathered", "handed", "arriving")
    total = {name: np.zeros(count) for name in names}
    items = subject.items_of(tables)
    for columns, group, choice, item in zip(tables.columns, tables.groups, choices, items, strict=True):
        total["forward"][item] += columns.forward[choice]
        total["backward"][item] += columns.backward[choice] + (columns.again[choice] if group in again else 0.0)
        total["weights"][item] += columns.weights[choice]
        total["once"][item] += once_at(columns, weights, choice)
        total["resting"][item] += columns.resting[choice]
        total["kept" if group >= 0 else "outside"][item] += columns.kept[choice]
        total["gathered"][item] += columns.gathered[choice]
        total["handed"][item] += columns.handed[choice]
        total["arriving"][item] += columns.arriving[choice]
    for first, second, table in tables.edges:
        cost = table[choices[first], choices[second]]
        total["forward"][items[second]] += cost / 2
        total["backward"][items[second]] += cost / 2
    if not subject.blocks:
        return {**total, "sent": total["handed"]}
    sent = np.zeros(count)
    for columns, choice, item, last in zip(tables.columns, choices, items, _last_items(subject, tables), strict=True):
        sent[item:last] += columns.handed[choice]
    return {**total, "sent": sent}


def _last_items(subject: PlanningCache, tables: Tables) -> list[int]:
    """Return, for every node, the item of the last reader of what it hands on; its own where nothing is sent.

    What is made outside of blocks is made again on every stage.
    """
    graph, found, operations = subject.graph, subject.items_of(tables), len(tables.strategies)
    for node, (name, group) in enumerate(zip(tables.names, tables.groups, strict=True)):
        outputs = graph.by_name[name].outputs if node < operations else (name,)
        uses = [subject.items[op.name] for output in outputs if output for op, _ in graph.consumers[output]]
        found[node] = max(found[node], *uses) if group >= 0 and uses else found[node]
    return found


def _stage(
    c: Configuration, numbers: Mapping[str, Numbers], again: frozenset[int], number: int, start: int, end: int
) -> StageEstimate:
    """Estimate one stage. A recomputed layer keeps only what it hands on; while it runs again, all of it is there once
    more."""
    devices = c.stage_devices
    ends = {len(devices) - 1: c.at_ends[1], 0: c.at_ends[0]}
    live = c.live(devices[number])  # of its layers; by how often the device runs them
    passes = ends.get(number, live) if c.chunks > 1 else live
    remote = number and devices[number - 1] != devices[number]
    received = float(numbers["sent"][start - 1]) if remote else 0.0
    kept, handed, outside = numbers["kept"], numbers["handed"], numbers["outside"]
    computed = [item for item in range(start, end) if item - 1 in again]
    held = sum(float(handed[item] if item in computed else kept[item]) for item in range(start, end))
    if not number and 1 in computed:
        held += float(handed[0])
    once_more = max((float(kept[item] + numbers["gathered"][item]) for item in computed), default=0.0)
    forward, backward, weights, once, resting, arriving = (
        float(numbers[n][start:end].sum()) for n in ("forward", "backward", "weights", "once", "resting", "arriving")
    )
    beside = float(outside[start:end].sum()) + received
    one = held + beside
    kept_in_all = live * held + passes * beside + once_more
    arriving = max(0.0, arriving - one)
    return StageEstimate((start, end), forward, backward, weights, once, resting, kept_in_all, arriving)


def send_seconds(cost: CostModel, c: Configuration, size: float) -> float:
    """Return the seconds in which one micro-batch, or its gradient, goes from a stage to its neighbour."""
    return cost.collective("send", size, c.places[PP])
