"""The solver's front door: the best choices of a problem, with or without a budget of memory, and always a bound.

Folding and elimination come first, which are exact; where tables would be wide, the same after dominated strategies are
removed; then HiGHS, which starts from the best choices among each node's most likely strategies.
"""

from __future__ import annotations

from math import inf

import numpy as np

from nnscaler.planning.solver.budget import solve_within
from nnscaler.planning.solver.fold import find_structure, solve_folded
from nnscaler.planning.solver.highs import Relaxation, optimise, relax
from nnscaler.planning.solver.problem import Edge, Infeasible, Node, Problem, Solution, TooWide, evaluate
from nnscaler.planning.solver.reduce import Reduced, reduce_problem, restrict

NARROW = 2.0**27  # table entries of all eliminations that look for a start
WORTH = 2.0**25  # table entries of an elimination, from which on it pays to remove dominated strategies first


def solve(problem: Problem, budget: float | None = None, seconds: float = 60.0) -> Solution:
    """Return choices, their value, a bound that is at most the optimum, and how they were found.

    `budget` limits the sum of memory. `seconds` is for each program of HiGHS, and only a problem that needs longer has
    an answer that depends on the machine. Raises `Infeasible` with the least memory where nothing is legal within the
    budget, and `TooWide` where no legal choice was found at all.
    """
    try:
        if budget is not None:
            return _exact(problem, budget, seconds)
        structure = find_structure(problem)
        if structure.work < WORTH:
            return solve_folded(problem, structure)
    except TooWide:
        pass
    reduced = reduce_problem(problem, memory=budget is not None)
    try:
        found = _exact(reduced.problem, budget, seconds)
    except TooWide as wide:
        found = _by_programs(reduced.problem, budget, seconds, wide)
    return _restored(problem, reduced, found)


def _exact(problem: Problem, budget: float | None, seconds: float) -> Solution:
    """Solve by folding, or by a hull within the budget. Raises `TooWide`."""
    if budget is None:
        return solve_folded(problem)
    return solve_within(problem, budget, seconds=min(seconds, 10.0))


def _by_programs(problem: Problem, budget: float | None, seconds: float, wide: TooWide) -> Solution:
    """Return the better of a start and the integer program's choices, with the better of the programs' bounds."""
    try:
        relaxed = relax(problem, budget, seconds)
        start = _start(problem, relaxed, budget)
        found = None
        if start is None or start.value > relaxed.bound + 1e-9 * abs(relaxed.bound):
            found = optimise(problem, budget, seconds, None if start is None else start.choices)
    except Infeasible:
        raise _least(problem, budget, seconds) from None
    solutions = [solution for solution in (start, found) if solution is not None]
    if not solutions:
        raise wide
    best = min(solutions, key=lambda solution: solution.value)
    bound = max(relaxed.bound, -inf if found is None else found.bound)
    how = "linear program" if found is None else "integer program"
    return Solution(best.choices, best.value, min(bound, best.value), how, relaxed.multiplier)


def _least(problem: Problem, budget: float | None, seconds: float) -> Infeasible:
    """Return the error for a problem with nothing legal within the budget, with the least memory of any legal
    choice."""
    if budget is None:
        return Infeasible(inf)
    nodes = tuple(
        Node(node.name, np.where(np.isfinite(node.cost), 0.0 if node.memory is None else node.memory, inf))
        for node in problem.nodes
    )
    edges = (Edge(e.first, e.second, np.where(np.isfinite(e.cost), 0.0, inf)) for e in problem.edges)
    try:
        return Infeasible(solve(Problem(nodes, tuple(edges)), None, seconds).value, budget)
    except Infeasible:
        return Infeasible(inf, budget)


def _start(problem: Problem, relaxed: Relaxation, budget: float | None) -> Solution | None:
    """Return the best choices among the strategies of each node that the relaxation prefers: as many as can be
    eliminated."""
    ranks = [np.lexsort((node.cost, -np.round(w, 9))) for node, w in zip(problem.nodes, relaxed.weights, strict=True)]
    for most in range(max(problem.sizes), 0, -1):
        narrow = restrict(problem, [np.sort(rank[:most]) for rank in ranks])
        try:
            if find_structure(narrow.problem).order.work > NARROW:
                continue
            if budget is None:
                found = solve_folded(narrow.problem)
            else:
                found = solve_within(narrow.problem, budget, seconds=1.0)
        except TooWide:
            continue
        except Infeasible:
            return None
        return _restored(problem, narrow, found)
    return None


def _restored(problem: Problem, smaller: Reduced, found: Solution) -> Solution:
    """Return the solution of a smaller problem as one of `problem`; the bound is that of the smaller one."""
    choices = smaller.restore(found.choices)
    value = evaluate(problem, choices)
    return Solution(choices, value, min(found.bound, value), found.how, found.multiplier)
