"""The best choices within one budget of memory, with a proven bound.

The bound is that of Lagrangian relaxation, from exact solves at prices of memory (see `hull`); the choices come from
the efficient points next to the budget and their crossings (see `repair`). Where a gap stays open, hubs are fixed one
by one (see `branch`), and a small problem is handed to an integer program.
"""

from __future__ import annotations

from nnscaler.planning.solver.branch import branch
from nnscaler.planning.solver.highs import columns_of, optimise
from nnscaler.planning.solver.pareto_frontier import Hull, hull, line_at
from nnscaler.planning.solver.problem import Infeasible, Problem, Solution, evaluate
from nnscaler.planning.solver.reduce import reduce_problem
from nnscaler.planning.solver.repair import repair_from

CLOSED = 0.005  # a gap that is small enough
SMALL = 30_000  # columns of an integer program that is worth trying
BRANCHES = 12  # subproblems with hubs fixed
POINTS = 64


def solve_within(problem: Problem, budget: float, found: Hull | None = None, seconds: float = 10.0) -> Solution:
    """Return choices whose memory is at most `budget`, their value, and a bound of the optimum.

    `found` is a hull of the same problem; without one, the hull is refined about the budget. `seconds` is for the
    integer program, which 0 leaves out. Raises `TooWide`, and `Infeasible` with the least memory of all choices.
    """
    swept = hull(problem, POINTS, budget) if found is None else found
    bound, price = line_at(swept, budget)
    start = swept.fastest_within(budget)
    best = repair_from(problem, swept, budget)
    how = "hull" if best is start else "hull, crossed"
    solution = Solution(best.choices, best.time, min(bound, best.time), how, price)
    if solution.gap > CLOSED:
        solution = branch(problem, budget, solution, swept, POINTS, BRANCHES)
    if solution.gap <= CLOSED or columns_of(problem) > SMALL or seconds <= 0.0:
        return solution
    return _closed(problem, budget, solution, seconds)


def _closed(problem: Problem, budget: float, solution: Solution, seconds: float) -> Solution:
    """Return the better of `solution` and the integer program's choices, with the better of both bounds."""
    reduced = reduce_problem(problem, memory=True)
    try:
        found = optimise(reduced.problem, budget, seconds)
    except Infeasible:  # by the program's tolerances: `solution` shows that it is not
        return solution
    if found is None:
        return solution
    choices = reduced.restore(found.choices)
    value = evaluate(problem, choices)
    bound = max(solution.bound, found.bound)
    if value < solution.value:
        return Solution(choices, value, min(bound, value), "integer program", solution.multiplier)
    return Solution(solution.choices, solution.value, min(bound, solution.value), solution.how, solution.multiplier)
