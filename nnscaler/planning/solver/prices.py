"""The Lagrangian bound under a budget at many prices of memory, from one elimination.

The price is a variable that is kept: every table of a node has it as an axis. That costs little more than one price
does, since most of the time goes into the many small tables and not into their entries.
"""

from __future__ import annotations

from math import inf

import numpy as np

from nnscaler.planning.solver.eliminate import Factor, run_elimination
from nnscaler.planning.solver.hull import ROUNDING
from nnscaler.planning.solver.order import find_order
from nnscaler.planning.solver.problem import Problem, Table, memory_floor

LOW, HIGH, COUNT = 1 / 64, 64.0, 12  # of the prices, in prices at which the budget costs what the fastest nodes do


def bound_by_prices(problem: Problem, budget: float) -> float:
    """A lower bound of the value of every choice within `budget`; +inf where it is clear that there is none. It may lie
    below the best Lagrangian bound, which has a price between these. Raises `TooWide`."""
    if memory_floor(problem) > budget:
        return inf
    base = sum(float(node.cost.min()) for node in problem.nodes) / max(budget, 1.0)
    prices = np.append(0.0, base * np.geomspace(LOW, HIGH, COUNT)) if 0.0 < base < inf else np.zeros(1)
    number = len(problem.nodes)  # of the price as a variable
    shared: dict[tuple[int, int], Table] = {}
    factors = []
    for index, node in enumerate(problem.nodes):
        key = (id(node.cost), id(node.memory))
        if key not in shared:
            memory = np.zeros(1) if node.memory is None else node.memory
            shared[key] = node.cost[:, None] + memory[:, None] * prices
        factors.append(Factor((index, number), shared[key]))
    factors += [Factor((edge.first, edge.second), edge.cost) for edge in problem.edges]
    sizes = (*problem.sizes, len(prices))
    order = find_order([factor.scope for factor in factors], range(number), sizes, keep=(number,))
    values = run_elimination(factors, order, sizes).table()
    rounding = ROUNDING * (np.abs(values) + prices * abs(budget))
    return float((values - prices * budget - rounding).max())
