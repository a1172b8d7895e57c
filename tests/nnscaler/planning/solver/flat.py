"""The optimum of a choice problem by elimination alone, no layers folded: what folding is held against."""

from __future__ import annotations

from nnscaler.planning.solver.problem import ChoiceProblem, Solution
from nnscaler.planning.solver.variable_elimination import (
    Factor,
    exact_solution,
    find_order,
    run_elimination,
    substitute,
)


def eliminate(problem: ChoiceProblem) -> Solution:
    """Return the optimum of `problem`. Raises `TooWide`, and `Infeasible` where no choice is legal."""
    factors = [Factor((index,), node.cost) for index, node in enumerate(problem.nodes)]
    factors += [Factor((edge.first, edge.second), edge.cost) for edge in problem.edges]
    order = find_order([factor.scope for factor in factors], range(len(problem.nodes)), problem.sizes)
    elimination = run_elimination(factors, order, problem.sizes)
    choices: dict[int, int] = {}
    substitute(elimination, choices)
    return exact_solution(problem, tuple(choices[index] for index in range(len(problem.nodes))), "elimination")
