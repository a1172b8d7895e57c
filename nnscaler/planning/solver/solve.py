"""Solve a choice problem, with or without a budget of memory, and always with a bound: the solver's entry.

Folding and elimination come first, which are exact; where tables would be wide, the same after dominated strategies are
removed; then HiGHS, which starts from the best choices among each node's most likely strategies.
"""

from __future__ import annotations

import heapq
from math import inf

import numpy as np

from nnscaler.planning.solver.drop_dominated_strategies import Reduced, reduce_problem, restrict
from nnscaler.planning.solver.fold_equal_layers import find_structure, min_marginal, solve_folded
from nnscaler.planning.solver.highs import Relaxation, columns_of, optimise, relax
from nnscaler.planning.solver.local_search import repair_from
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Infeasible, Node, Solution, TooWide, evaluate
from nnscaler.planning.solver.sweep_memory_price import ROUNDING, Hull, hull, line_at

# Branch and bound (Land and Doig 1960) over the nodes of no layer, where one price of memory leaves a gap.
# A hub that all layers touch makes them jump together between its strategies, and between two jumps no crossing
# lies. With the hub fixed, layers change one by one again. The min-marginals of the hub at the price of the bound
# say which of its strategies can still be better than what is known.

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


# The best choices within one budget of memory, with a proven bound.
# The bound is that of Lagrangian relaxation, from exact solves at prices of memory (see `sweep_memory_price`); the
# choices come from the efficient points next to the budget and their crossings (see `repair`). Where a gap stays
# open, hubs are fixed one by one (see `branch`), and a small problem is handed to an integer program.

CLOSED = 0.005  # a gap that is small enough
SMALL = 30_000  # columns of an integer program that is worth trying
BRANCHES = 12  # subproblems with hubs fixed
POINTS = 64


def solve_within(problem: ChoiceProblem, budget: float, found: Hull | None = None, seconds: float = 10.0) -> Solution:
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


def _closed(problem: ChoiceProblem, budget: float, solution: Solution, seconds: float) -> Solution:
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


NARROW = 2.0**27  # table entries of all eliminations that look for a start
WORTH = 2.0**25  # table entries of an elimination, from which on it pays to remove dominated strategies first


def solve(problem: ChoiceProblem, budget: float | None = None, seconds: float = 60.0) -> Solution:
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


def _exact(problem: ChoiceProblem, budget: float | None, seconds: float) -> Solution:
    """Solve by folding, or by a hull within the budget. Raises `TooWide`."""
    if budget is None:
        return solve_folded(problem)
    return solve_within(problem, budget, seconds=min(seconds, 10.0))


def _by_programs(problem: ChoiceProblem, budget: float | None, seconds: float, wide: TooWide) -> Solution:
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


def _least(problem: ChoiceProblem, budget: float | None, seconds: float) -> Infeasible:
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
        return Infeasible(solve(ChoiceProblem(nodes, tuple(edges)), None, seconds).value, budget)
    except Infeasible:
        return Infeasible(inf, budget)


def _start(problem: ChoiceProblem, relaxed: Relaxation, budget: float | None) -> Solution | None:
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


def _restored(problem: ChoiceProblem, smaller: Reduced, found: Solution) -> Solution:
    """Return the solution of a smaller problem as one of `problem`; the bound is that of the smaller one."""
    choices = smaller.restore(found.choices)
    value = evaluate(problem, choices)
    return Solution(choices, value, min(found.bound, value), found.how, found.multiplier)
