"""Evaluate one configuration: its best choices, its stages, and their time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nnscaler.ir.gradients_and_kept_values import kept_by
from nnscaler.ir.graph import Operation
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.estimate_stages import (
    ComputedAgain,
    StageEstimate,
    at_peaks,
    item_numbers,
    saved_by,
    send_seconds,
    stage_of,
)
from nnscaler.planning.planner.interlaced_end_costs import ends_of
from nnscaler.planning.planner.planner_graph import EndsEstimate, PlanningCache
from nnscaler.planning.sharding.build_problem import Weights, pose
from nnscaler.planning.sharding.cost_tables import Tables, when_backward_ends
from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Solution, TooWide, memory_floor, memory_of
from nnscaler.planning.solver.solve import solve, solve_within
from nnscaler.planning.solver.sweep_memory_price import bound_at, hull
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts, cut_limits
from nnscaler.transform.cheap_outputs import CheapOutputs
from nnscaler.transform.partition_stages import SLACK
from nnscaler.transform.plan import CP, DP, EP, TP

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


@dataclass(frozen=True)
class Evaluated:
    """A configuration with choices for it.

    seconds   of one step
    bound     seconds of a step that no choices in this configuration go below
    fits      whether its memory is within the limit
    choices   by node of the tables, the number of its strategy
    again     what is recomputed in backward
    tables    the cost tables that the choices refer to
    weights   how the parts of a step count
    stages    one entry per stage
    """

    configuration: Configuration
    seconds: float
    bound: float
    fits: bool
    choices: tuple[int, ...]
    again: ComputedAgain
    tables: Tables
    weights: Weights
    stages: tuple[StageEstimate, ...]

    def __str__(self) -> str:
        some = self.configuration.recompute is None and bool(self.again.layers)
        layers = f", recompute {len(self.again.layers)} layers" if some else ""
        outputs = sum(len(one.again) for one in self.again.outputs)
        return f"{self.configuration}{layers}" + (f", recompute {outputs} cheap outputs" if outputs else "")

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
    again = ComputedAgain(frozenset(range(len(subject.layers))) if c.recompute else frozenset())
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
        one = evaluated(subject, c, tables, weights, solution.choices, again, (0, *cuts, count))
        every.append(_with_cheap_outputs(subject, one, memory))
    found = min(every, key=lambda one: (one.memory > memory, one.seconds))
    prices = (solution.multiplier,) * count_of
    stages = tuple(replace(stage, price=price) for stage, price in zip(found.stages, prices, strict=True))
    return replace(found, bound=solution.bound, stages=stages)


def _with_cheap_outputs(subject: PlanningCache, found: Evaluated, memory: float) -> Evaluated:
    """Let backward compute cheap outputs again, those that save most for their seconds first, until each rank keeps
    within `memory` bytes, as far as there are any; then none of them that is not needed for that.

    None where backwards run in halves: in all stages but the first W keeps what I has computed again, and the first one
    alone was no gain (docs/performance.md).
    """
    c = found.configuration
    permitted = subject.constraint.permits(replace(c, recompute=None))  # not where `recompute = false` is asked for
    in_halves = any(c.figures.in_halves(device, c.chunks) for device in range(c.pp))
    if found.memory <= memory or in_halves or not permitted:
        return found
    stages = [(stage.items, device) for stage, device in zip(found.stages, c.stage_devices, strict=True)]
    left = [one for one in _free_outputs(found, subject) if _within_one(subject, one, [items for items, _ in stages])]
    lightest = _recomputing(subject, found, tuple(left))
    if lightest.memory > memory:
        return lightest
    gains = {one: saved_by(found.tables, found.choices, one) for one in left}
    left.sort(key=lambda one: gains[one][1] / max(gains[one][0], 1.0))
    while found.memory > memory:
        held = by_device(c, [stage.memory for stage in found.stages])
        over = [items for items, device in stages if held[device] > memory]
        best = next((one for one in left if _within_one(subject, one, over)), None)
        if best is None:  # by rounding alone
            return lightest
        left.remove(best)
        found = _recomputing(subject, found, (*found.again.outputs, best))
    for one in sorted(found.again.outputs, key=lambda one: -gains[one][1]):
        fewer = _recomputing(subject, found, tuple(other for other in found.again.outputs if other is not one))
        found = fewer if fewer.memory <= memory else found
    return found


def _recomputing(subject: PlanningCache, found: Evaluated, outputs: tuple[CheapOutputs, ...]) -> Evaluated:
    """Return the same choices and stages with these cheap outputs computed again."""
    edges = (*(stage.items[0] for stage in found.stages), found.stages[-1].items[1])
    again = replace(found.again, outputs=outputs)
    return evaluated(subject, found.configuration, found.tables, found.weights, found.choices, again, edges)


def _free_outputs(found: Evaluated, subject: PlanningCache) -> list[CheapOutputs]:
    """Return the cheap outputs that are read as they are made, and read what others keep as these keep it."""
    graph, tables = subject.graph, found.tables
    nodes = zip(tables.strategies, found.choices, strict=False)  # of operations, which come first
    chosen = {name: tables.strategies[name][choice] for name, choice in nodes}

    def keeps(op: Operation, slot: int, one: CheapOutputs) -> bool:
        earlier = subject.items[op.name] <= subject.items[one.operations[0]]  # as one that is later may be on a stage
        return earlier and slot in kept_by(graph, op, subject.signatures[op.name])

    def alike(one: CheapOutputs, op: Operation, slot: int) -> bool:
        name, need = op.inputs[slot], chosen[op.name].needs[slot]
        made = graph.producers.get(name)
        if made is not None and made.name in one.again:
            return chosen[made.name].makes[made.outputs.index(name)] == need
        if made is None or slot in kept_by(graph, op, subject.signatures[op.name]):
            return True
        return any(chosen[o.name].needs[i] == need and keeps(o, i, one) for o, i in graph.consumers[name])

    inside = ((one, [graph.by_name[name] for name in one.operations]) for one in subject.activations.cheap)
    return [one for one, ops in inside if all(alike(one, op, i) for op in ops for i in range(len(op.inputs)))]


def _within_one(subject: PlanningCache, one: CheapOutputs, stages: Sequence[tuple[int, int]]) -> bool:
    """Return whether one of the stages (items) has all of the operations."""
    items = [subject.items[name] for name in one.operations]
    return any(start <= min(items) and max(items) < end for start, end in stages)


def evaluated(
    subject: PlanningCache,
    c: Configuration,
    tables: Tables,
    weights: Weights,
    choices: Sequence[int],
    again: ComputedAgain,
    edges: Sequence[int],
) -> Evaluated:
    """Return time and memory of a step with these choices, with the pipeline cut at these items.

    A step takes what the schedule makes of the stages' seconds, and the largest of what stages do once per step.
    """
    numbers = item_numbers(subject, tables, weights, choices, again)
    devices, ends = c.stage_devices, ends_of(subject, c)
    count = len(devices)
    made = [stage_of(c, numbers, again, s, edges[s], edges[s + 1]) for s in range(count)]
    stages = tuple(_with_ends(stage, ends) for stage in at_peaks(c, made))
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


def _with_ends(stage: StageEstimate, ends: EndsEstimate) -> StageEstimate:
    """Return a stage with the bytes of the shared ends, which each device holds besides."""
    return replace(stage, resting=stage.resting + ends.resting, kept=stage.kept + ends.kept)


def beside(subject: PlanningCache, c: Configuration) -> float:
    """Return the seconds of a step in which all devices of a pipeline run its shared ends."""
    ends = ends_of(subject, c)
    return c.micro_batches * ends.seconds + ends.once
