"""One configuration: the best choices in it, its stages, and what these take in time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.cost.gradients import seconds_per_byte
from nnscaler.planning.planner.configurations import Configuration
from nnscaler.planning.planner.subject import Subject
from nnscaler.planning.sharding.pose import Weights, once_of, pose
from nnscaler.planning.sharding.tables import Tables
from nnscaler.planning.solver.budget import solve_within
from nnscaler.planning.solver.hull import bound_at, hull
from nnscaler.planning.solver.problem import Solution, memory_of
from nnscaler.planning.solver.solve import solve
from nnscaler.transform.balance import balanced_cuts

TRIES = 3  # budgets of memory that are tried
POINTS = 12  # of the hull of time and memory
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One pipeline device. `items`: the first one and the one after the last; seconds of one micro-batch; seconds once
    per step; bytes."""

    items: tuple[int, int]
    forward: float
    backward: float
    once: float
    resting: float
    kept: float

    @property
    def memory(self) -> float:
        return self.resting + self.kept


@dataclass(frozen=True)
class Evaluated:
    """`seconds` of one step; `bound`: no choices in this configuration take less. `fits`: its memory does."""

    configuration: Configuration
    seconds: float
    bound: float
    fits: bool
    solution: Solution
    tables: Tables
    weights: Weights
    stages: tuple[StageEstimate, ...]

    @property
    def memory(self) -> float:
        """Bytes of the rank that holds most."""
        return max(stage.memory for stage in self.stages)


def weights_of(subject: Subject, c: Configuration) -> Weights:
    """How the parts of a step count in a configuration."""
    rates = {
        axis: seconds_per_byte(subject.cost, c.places[axis]) for axis, size in (("dp", c.dp), ("tp", c.tp)) if size > 1
    }
    return Weights(c.each, 1 / c.pp, rates, min(c.micro_batches, c.pp), c.recompute)


def evaluate(subject: Subject, c: Configuration, memory: float) -> Evaluated | None:
    """The fastest choices that fit into `memory` bytes, or, where none is found, the last ones tried. None where it is
    proved that nothing fits."""
    tables = subject.tables(c.tp, c.parts)
    weights = weights_of(subject, c)
    problem = pose(tables, weights)
    solution = solve(problem)
    found = _with(subject, c, tables, weights, solution)
    if found.memory <= memory:
        return found
    if c.pp == 1 and sum(float(np.min(n.memory)) for n in problem.nodes if n.memory is not None) > memory:
        return None
    swept = hull(problem, POINTS)
    bound = max(solution.bound, bound_at(swept, memory)) if c.pp == 1 else solution.bound
    if bound == np.inf:
        return None
    budget = memory_of(problem, solution.choices)
    for _ in range(TRIES):
        budget *= memory / found.memory * 0.995
        if swept.least_memory > budget:
            break
        found = _with(subject, c, tables, weights, solve_within(problem, budget, swept, seconds=0.0))
        budget = memory_of(problem, found.solution.choices)
        if found.memory <= memory:
            break
    return replace(found, bound=bound, fits=found.memory <= memory)


def _with(subject: Subject, c: Configuration, tables: Tables, weights: Weights, solution: Solution) -> Evaluated:
    stages = stages_of(subject, c, tables, weights, solution.choices)
    sent = 2 * _sent(subject, c, tables, solution.choices) if c.pp > 1 else 0.0
    times = [stage.forward + stage.backward + sent for stage in stages]
    step = sum(times) + (c.micro_batches - 1) * max(times) + max(stage.once for stage in stages)
    return Evaluated(c, step, solution.bound, True, solution, tables, weights, stages)


def item_numbers(subject: Subject, tables: Tables, weights: Weights, choices: Sequence[int]) -> Mapping[str, Numbers]:
    """Per item (before the layers, every layer, after them): seconds of one micro-batch forward and backward, seconds
    once per step, bytes at rest, kept by one micro-batch, and handed on."""
    count = len(subject.layers) + 2
    names = ("forward", "backward", "once", "resting", "kept", "handed")
    total = {name: np.zeros(count) for name in names}
    items = node_items(subject, tables)
    for i, (columns, choice, item) in enumerate(zip(tables.columns, choices, items, strict=True)):
        again = columns.forward[choice] if weights.recompute and tables.groups[i] >= 0 else 0.0
        total["forward"][item] += columns.forward[choice]
        total["backward"][item] += columns.backward[choice] + again
        total["once"][item] += once_of(columns, weights)[choice]
        total["resting"][item] += columns.resting[choice]
        total["kept"][item] += columns.kept[choice]
        total["handed"][item] += columns.handed[choice]
    for first, second, table in tables.edges:
        cost = table[choices[first], choices[second]]
        total["forward"][items[second]] += cost / 2
        total["backward"][items[second]] += cost / 2
    return total


def node_items(subject: Subject, tables: Tables) -> list[int]:
    """The item of every node: that of the operation, of the producer, or of the first reader."""
    graph, items = subject.graph, subject.items
    found = [items[op.name] for op in graph.operations]
    for name in tables.names[len(graph.operations) :]:
        producer = graph.producers.get(name)
        user = producer if producer is not None else graph.consumers[name][0][0]
        found.append(items[user.name])
    return found


def stages_of(
    subject: Subject, c: Configuration, tables: Tables, weights: Weights, choices: Sequence[int]
) -> tuple[StageEstimate, ...]:
    """The stages of the best cut between layers."""
    numbers = item_numbers(subject, tables, weights, choices)
    count = len(numbers["forward"])
    costs = list(numbers["forward"] + numbers["backward"])
    between = list(
        range(2, count - 1)
    )  # what is before the layers stays with the first one, what follows with the last
    cuts = balanced_cuts(costs, between, between, [0] * len(between), c.pp)
    assert cuts is not None, c
    edges = (0, *cuts, count)
    found = []
    for stage in range(c.pp):
        part = slice(edges[stage], edges[stage + 1])
        live = min(c.micro_batches, c.pp - stage)
        received = float(numbers["handed"][edges[stage] - 1]) if stage else 0.0
        kept = live * (float(numbers["kept"][part].sum()) + received)
        if c.recompute:
            inside = numbers["kept"][part]
            layers = inside[1 if stage == 0 else 0 : len(inside) - (stage == c.pp - 1)]
            outside = float(inside.sum() - layers.sum())
            kept = live * (float(numbers["handed"][part].sum()) + outside + received) + float(layers.max(initial=0.0))
        forward, backward, once, resting = (
            float(numbers[n][part].sum()) for n in ("forward", "backward", "once", "resting")
        )
        found.append(StageEstimate((edges[stage], edges[stage + 1]), forward, backward, once, resting, kept))
    return tuple(found)


def _sent(subject: Subject, c: Configuration, tables: Tables, choices: Sequence[int]) -> float:
    """Seconds in which one micro-batch goes from a stage to the next: of what layers hand on, on the average."""
    handed = sum(
        float(columns.handed[choice])
        for columns, choice, group in zip(tables.columns, choices, tables.groups, strict=True)
        if group >= 0
    )
    return subject.cost.collective("send", handed / max(len(subject.layers), 1), c.places["pp"])
