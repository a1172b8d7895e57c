"""Build a choice problem from cost tables: how often each part of a step counts, and how many micro-batches are
alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nnscaler.planning.sharding.cost_tables import Column, Columns, Tables
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Node
from nnscaler.scheduling.schedule import Ramp


@dataclass(frozen=True, slots=True)
class Weights:
    """
    each        how often the seconds of one micro-batch count
    once        how often the seconds at the end of a step count
    rates       by axis, seconds per byte of gradients summed over it
    live        micro-batches that are between forward and backward at once
    recompute   whether layers keep only their inputs, and run forward twice
    passes      how often the seconds of F, I and W of one micro-batch count; None: `each`
    """

    each: float = 1.0
    once: float = 1.0
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    live: float = 1
    recompute: bool = False
    passes: Ramp | None = None

    @property
    def conversions(self) -> float:
        """How often the seconds of a conversion count: half of it is F's, and half of it I's."""
        return self.each if self.passes is None else (self.passes[0] + self.passes[1]) / 2


@dataclass(frozen=True, slots=True)
class LayerWindow:
    """Some of many equal layers, which stand for all of them in lower bounds.

    The problem of a window has a value that no choices for all layers come below: of any choices, some window of the
    layers is no dearer than the mean, and what goes between other layers is left out.

    groups   numbers of the layers in the window
    times    how many times as much each of them counts
    """

    groups: frozenset[int]
    times: float


def pose(
    tables: Tables, weights: Weights, window: LayerWindow | None = None, layers_only: bool = False
) -> ChoiceProblem:
    """Return the problem whose value is the weighted time, and whose memory is that of one rank running the whole
    graph.

    With `layers_only`, nodes outside of layers have no memory.
    """
    times = [1.0] * len(tables.groups)
    if window is not None:
        times = [window.times if group in window.groups else 1.0 for group in tables.groups]
    made: dict[tuple[int, bool, float], tuple[Column, Column]] = {}
    nodes = []
    for name, group, columns, often in zip(tables.names, tables.groups, tables.columns, times, strict=True):
        key = (id(columns), group >= 0, often)
        if key not in made:
            memory = bytes_of(columns, weights, group >= 0) * (often if group >= 0 or not layers_only else 0.0)
            made[key] = (often * seconds_of(columns, weights, group >= 0), memory)
        nodes.append(Node(name, *made[key], group))
    scaled: dict[tuple[int, float], Column] = {}
    edges = []
    for first, second, table in tables.edges:
        often = weights.conversions * max(times[first], times[second])
        if (id(table), often) not in scaled:
            scaled[id(table), often] = table if often == 1.0 else often * table
        edges.append(Edge(first, second, scaled[id(table), often]))
    return ChoiceProblem(tuple(nodes), tuple(edges))


def seconds_of(columns: Columns, weights: Weights, in_layer: bool) -> Column:
    """Return the weighted seconds of a node's strategies: [strategies]."""
    again = columns.again if weights.recompute and in_layer else 0.0
    if weights.passes is None:
        return weights.each * (columns.forward + columns.backward + again) + weights.once * once_of(columns, weights)
    f, i, w = weights.passes
    seconds: Column = f * columns.forward + i * (columns.backward - columns.weights + again) + w * columns.weights
    return seconds + weights.once * once_of(columns, weights)


def once_of(columns: Columns, weights: Weights) -> Column:
    """Return the seconds once per step, of sums of gradients and of what goes to where it rests: [strategies]."""
    total = columns.once
    for axis, size in columns.summed.items():
        total = total + weights.rates.get(axis, 0.0) * size
    return total


def once_at(columns: Columns, weights: Weights, choice: int) -> float:
    """Return `once_of` for one strategy."""
    sums = (weights.rates.get(axis, 0.0) * float(size[choice]) for axis, size in columns.summed.items())
    return sum(sums, float(columns.once[choice]))


def bytes_of(columns: Columns, weights: Weights, in_layer: bool) -> Column:
    """Return the bytes of a node's strategies, at rest and kept by the live micro-batches: [strategies]."""
    kept = columns.handed if weights.recompute and in_layer else columns.kept
    return columns.resting + weights.live * kept
