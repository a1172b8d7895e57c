"""A choice problem as data: nodes that each take one of their strategies, and edges that price pairs of them.

Solvers know nothing of graphs or of torch. The value of a choice is the sum of its nodes' costs and of its edges'
costs; its memory is the sum of its nodes' memory. +inf marks what is forbidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


class TooWide(Exception):
    """The tables of an exact elimination would have 2**`log2_entries` entries, more than is allowed."""

    def __init__(self, log2_entries: float) -> None:
        super().__init__(log2_entries)
        self.log2_entries = log2_entries


class Infeasible(Exception):
    """No choice is legal within `budget`. `least_memory` is the smallest memory of a legal choice, or +inf where no
    choice is legal at all."""

    def __init__(self, least_memory: float, budget: float = inf) -> None:
        super().__init__(least_memory, budget)
        self.least_memory = least_memory
        self.budget = budget


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A variable that takes one of k strategies.

    Nodes with the same `group` >= 0 belong to the same layer, and consecutive layers have consecutive numbers. Layers
    are equal where their nodes and edges, in the order of their indices, have the same tables: best the same arrays.

    name     for messages
    cost     [k]: of each strategy, in the unit of the problem; +inf where it is forbidden
    memory   [k]: of each strategy; None where no memory is used
    group    the number of the layer, -1 for none
    """

    name: str
    cost: Table
    memory: Table | None = None
    group: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A cost of two nodes together.

    first    index of a node
    second   index of another node
    cost     [k of first, k of second]
    """

    first: int
    second: int
    cost: Table


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceProblem:
    """Nodes and the edges between them. Several edges between the same two nodes add."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        sizes = self.sizes
        checked: set[int] = set()  # what nodes share is looked at once
        for node in self.nodes:
            assert node.memory is None or node.memory.shape == node.cost.shape, node.name
            if id(node.cost) not in checked:
                checked.add(id(node.cost))
                assert node.cost.dtype == np.float64 and node.cost.ndim == 1 and len(node.cost), node.name
                assert not np.isnan(node.cost).any() and not np.isneginf(node.cost).any(), node.name
            if node.memory is not None and id(node.memory) not in checked:
                checked.add(id(node.memory))
                assert node.memory.dtype == np.float64 and np.isfinite(node.memory).all(), node.name
        for edge in self.edges:
            assert edge.first != edge.second and min(edge.first, edge.second) >= 0, (edge.first, edge.second)
            assert edge.cost.shape == (sizes[edge.first], sizes[edge.second]), (edge.first, edge.second)
            if id(edge.cost) not in checked:
                checked.add(id(edge.cost))
                assert edge.cost.dtype == np.float64, (edge.first, edge.second)
                assert not np.isnan(edge.cost).any() and not np.isneginf(edge.cost).any(), (edge.first, edge.second)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of strategies of each node."""
        return tuple(len(node.cost) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Solution:
    """One strategy per node, and a proof of how good they are.

    choices      by node, the number of its strategy
    value        the cost of the choices
    bound        a proven lower bound of the optimum
    how          the method that found them
    multiplier   the price of one unit of memory that proves the bound; 0 without a budget
    """

    choices: tuple[int, ...]
    value: float
    bound: float
    how: str
    multiplier: float = 0.0

    @property
    def gap(self) -> float:
        """How far above the optimum the value can be, relative to the value."""
        return 0.0 if self.value <= self.bound else (self.value - self.bound) / max(abs(self.value), 1e-300)


def evaluate(problem: ChoiceProblem, choices: Sequence[int]) -> float:
    """Return the cost of `choices`, one strategy per node; +inf where they are forbidden."""
    assert len(choices) == len(problem.nodes)
    nodes = sum(float(node.cost[choice]) for node, choice in zip(problem.nodes, choices, strict=True))
    return nodes + sum(float(edge.cost[choices[edge.first], choices[edge.second]]) for edge in problem.edges)


def memory_of(problem: ChoiceProblem, choices: Sequence[int]) -> float:
    """Return the memory of `choices`, one strategy per node."""
    pairs = zip(problem.nodes, choices, strict=True)
    return sum(float(node.memory[choice]) for node, choice in pairs if node.memory is not None)


def memory_floor(problem: ChoiceProblem) -> float:
    """Return a lower bound of the memory of any choices: of each node the least, whether these go together or not."""
    return sum(float(node.memory.min()) for node in problem.nodes if node.memory is not None)
