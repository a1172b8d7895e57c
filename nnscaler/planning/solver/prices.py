"""The Lagrangian bound under a budget at many prices of memory at once.

The price is one more node, with an edge to every other one, and the bound follows from the best value with it fixed to
each of its strategies. Equal layers are folded as they are at a single price: the price is a hub of theirs.
"""

from __future__ import annotations

from math import inf

import numpy as np

from nnscaler.planning.solver.fold import min_marginal
from nnscaler.planning.solver.pareto_frontier import ROUNDING
from nnscaler.planning.solver.problem import Edge, Node, Problem, Table, memory_floor

LOW, HIGH, COUNT = 1 / 64, 64.0, 12  # of the prices, in prices at which the budget costs what the fastest nodes do


def bound_by_prices(problem: Problem, budget: float) -> float:
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
    values = min_marginal(Problem((*problem.nodes, Node("price", np.zeros(len(prices)))), tuple(edges)), number)
    # [prices]: `values` are the least priced values; less the price of the whole budget, each is a bound
    rounding = ROUNDING * (np.abs(values) + prices * abs(budget))
    return float((values - prices * budget - rounding).max())
