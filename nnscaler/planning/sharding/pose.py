"""From tables to a choice problem: how often each part of a step counts, and how many micro-batches are alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nnscaler.planning.sharding.tables import Column, Columns, Tables
from nnscaler.planning.solver.problem import Edge, Node, Problem


@dataclass(frozen=True, slots=True)
class Weights:
    """
    each        how often the seconds of one micro-batch count
    once        how often what is done once per step counts
    rates       by axis, seconds per byte of gradients summed over it
    live        micro-batches that are between forward and backward at once
    recompute   layers keep what goes in, and run forward twice
    """

    each: float = 1.0
    once: float = 1.0
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    live: int = 1
    recompute: bool = False


def pose(tables: Tables, weights: Weights) -> Problem:
    """The problem whose value is the weighted time, and whose memory is that of one rank running the whole graph."""
    made: dict[tuple[int, bool], tuple[Column, Column]] = {}
    nodes = []
    for name, group, columns in zip(tables.names, tables.groups, tables.columns, strict=True):
        key = (id(columns), group >= 0)
        if key not in made:
            made[key] = (seconds_of(columns, weights, group >= 0), bytes_of(columns, weights, group >= 0))
        nodes.append(Node(name, *made[key], group))
    scaled: dict[int, Column] = {}
    edges = []
    for first, second, table in tables.edges:
        if id(table) not in scaled:
            scaled[id(table)] = weights.each * table if weights.each != 1.0 else table
        edges.append(Edge(first, second, scaled[id(table)]))
    return Problem(tuple(nodes), tuple(edges))


def seconds_of(columns: Columns, weights: Weights, in_layer: bool) -> Column:
    """Of a node's strategies, by the weights."""
    again = columns.forward if weights.recompute and in_layer else 0.0
    return weights.each * (columns.forward + columns.backward + again) + weights.once * once_of(columns, weights)


def once_of(columns: Columns, weights: Weights) -> Column:
    """Seconds of the sums of gradients at the end of a step."""
    total: Column = np.zeros_like(columns.forward)
    for axis, size in columns.summed.items():
        total = total + weights.rates.get(axis, 0.0) * size
    return total


def bytes_of(columns: Columns, weights: Weights, in_layer: bool) -> Column:
    """Of a node's strategies: at rest, and what the live micro-batches keep."""
    kept = columns.handed if weights.recompute and in_layer else columns.kept
    return columns.resting + weights.live * kept
