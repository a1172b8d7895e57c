"""Branch and bound (Land and Doig 1960) over the nodes of no layer, where one price of memory leaves a gap.

A hub that all layers touch makes them jump together between its strategies, and between two jumps no crossing lies.
With the hub fixed, layers change one by one again. The min-marginals of the hub at the price of the bound say which of
its strategies can still be better than what is known.
"""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from nnscaler.planning.solver.fold import min_marginal
from nnscaler.planning.solver.pareto_frontier import ROUNDING, Hull, hull, line_at
from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Solution, TooWide, evaluate
from nnscaler.planning.solver.reduce import Reduced, restrict
from nnscaler.planning.solver.repair import repair_from

Fixed = tuple[tuple[int, int], ...]  # nodes and their choices


def branch(problem: ChoiceProblem, budget: float, solution: Solution, swept: Hull, points: int, most: int) -> Solution:
    """Return `solution` or a better one, and a bound that is no worse, after at most `most` subproblems.

    `swept` is the hull of `problem` that proves the bound of `solution`; subproblems have hulls of `points` points.
    """
    choices, value = solution.choices, solution.value
    # The optimum is no less than `value`, the bounds of all that waits, and `leaves`.
    leaves = inf  # the least bound of what is not split any further
    waiting: list[tuple[float, Fixed]] = []
    if not _split(problem, swept, budget, (), value, waiting):
        return solution
    for _ in range(most):
        if not waiting or waiting[0][0] >= value:
            break
        bound, fixed = heapq.heappop(waiting)
        part = _with(problem, fixed)
        try:
            inside = hull(part.problem, points, budget)
            best = repair_from(part.problem, inside, budget)
        except Infeasible:
            continue
        found = part.restore(best.choices)
        if (reached := evaluate(problem, found)) < value:
            choices, value = found, reached
        bound = max(bound, line_at(inside, budget)[0])
        if bound < value and not _split(part.problem, inside, budget, fixed, value, waiting):
            leaves = min(leaves, bound)
    bound = max(solution.bound, min(leaves, value, waiting[0][0] if waiting else inf))
    how = solution.how if value == solution.value else "hull, branched"
    return Solution(choices, value, min(bound, value), how, solution.multiplier)


def _split(
    problem: ChoiceProblem, swept: Hull, budget: float, fixed: Fixed, value: float, waiting: list[tuple[float, Fixed]]
) -> bool:
    """Push the strategies of a node that differs on the two sides of the budget, where they are worth a look.

    Returns False where there is no such node.
    """
    node = _undecided(problem, swept, budget)
    bound, price = line_at(swept, budget)
    if node is None:
        return False
    try:
        marginal = min_marginal(problem, node, price)
    except TooWide:
        return False
    for choice in np.flatnonzero(np.isfinite(marginal)).tolist():
        best = float(marginal[choice])
        proven = best - price * budget - ROUNDING * (abs(best) + price * abs(budget))
        if proven < value:
            heapq.heappush(waiting, (max(bound, proven), (*fixed, (node, choice))))
    return True


def _undecided(problem: ChoiceProblem, swept: Hull, budget: float) -> int | None:
    """Return the first node of no layer that chooses differently at the two points about the budget."""
    within = swept.points.index(swept.fastest_within(budget))
    if within == 0:
        return None
    left, right = swept.points[within - 1], swept.points[within]
    differ = (index for index, (a, b) in enumerate(zip(left.choices, right.choices, strict=True)) if a != b)
    return next((index for index in differ if problem.nodes[index].group < 0), None)


def _with(problem: ChoiceProblem, fixed: Fixed) -> Reduced:
    """Return the problem in which some nodes have one strategy only."""
    kept = [np.arange(size) for size in problem.sizes]
    for node, choice in fixed:
        kept[node] = np.array([choice])
    return restrict(problem, kept)
