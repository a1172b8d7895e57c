"""All tables of a problem end to end in one array, so that many choices are looked up at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.problem import Problem, Table

Indices = NDArray[np.int_]


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """All tables of a problem end to end, and where each begins.

    cost           costs of nodes
    cost_start     [nodes]: where each node's table begins in `cost`
    memory         memory of nodes
    memory_start   [nodes]: where each node's table begins in `memory`
    edge           costs of edges
    edge_start     [edges]: where each edge's table begins in `edge`
    first          [edges]: index of its first node
    second         [edges]: index of its second node
    width          [edges]: number of columns of its table
    loose          [nodes]: whether it is of no layer
    """

    cost: Table
    cost_start: Indices
    memory: Table
    memory_start: Indices
    edge: Table
    edge_start: Indices
    first: Indices
    second: Indices
    width: Indices
    loose: NDArray[np.bool_]  # nodes of no layer

    def cost_of(self, choices: Indices) -> Table:
        """Return the cost of each node: [nodes]."""
        found: Table = self.cost[self.cost_start + choices]
        return found

    def memory_of(self, choices: Indices) -> Table:
        """Return the memory of each node: [nodes]."""
        found: Table = self.memory[self.memory_start + choices]
        return found

    def edge_cost_of(self, first: Indices, second: Indices) -> Table:
        """Return the cost of each edge, whose nodes choose `first` and `second`: all [edges]."""
        found: Table = self.edge[self.edge_start + first * self.width + second]
        return found


def flatten(problem: Problem) -> Flat:
    """Return the tables of `problem` as a `Flat`."""
    none = np.zeros(max(problem.sizes, default=0))
    cost, cost_start = _end_to_end(node.cost for node in problem.nodes)
    memory, memory_start = _end_to_end(none if node.memory is None else node.memory for node in problem.nodes)
    edge, edge_start = _end_to_end(edge.cost for edge in problem.edges)
    first = np.array([edge.first for edge in problem.edges], np.int_)
    second = np.array([edge.second for edge in problem.edges], np.int_)
    width = np.array([edge.cost.shape[1] for edge in problem.edges], np.int_)
    loose = np.array([node.group < 0 for node in problem.nodes])
    return Flat(cost, cost_start, memory, memory_start, edge, edge_start, first, second, width, loose)


def _end_to_end(tables: Iterable[Table]) -> tuple[Table, Indices]:
    """Return the distinct tables in one array, and the place at which each of `tables` begins."""
    places: dict[int, int] = {}
    parts: list[Table] = []
    starts: list[int] = []
    end = 0
    for table in tables:
        if id(table) not in places:
            places[id(table)] = end
            parts.append(table.ravel())
            end += table.size
        starts.append(places[id(table)])
    return np.concatenate(parts) if parts else np.zeros(0), np.array(starts, np.int_)
