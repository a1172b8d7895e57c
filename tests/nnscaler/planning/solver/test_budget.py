"""Answers within a budget of memory, the hull, and the front door."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from nnscaler.planning.planner.bounds.configuration import bound_by_prices
from nnscaler.planning.solver import variable_elimination as elimination
from nnscaler.planning.solver.highs import relax
from nnscaler.planning.solver.local_search import best_crossing, flatten
from nnscaler.planning.solver.problem import (
    ChoiceProblem,
    Edge,
    Infeasible,
    Node,
    Solution,
    evaluate,
    memory_of,
)
from nnscaler.planning.solver.solve import branch, solve, solve_within
from nnscaler.planning.solver.sweep_memory_price import Point, bound_at, hull, line_at
from tests.nnscaler.planning.solver.flat import eliminate
from tests.nnscaler.planning.solver.problems import SHAPES, joint_tables, layered, random_problem
from tests.sampling import every


@pytest.mark.parametrize("shape", every(2, SHAPES))
def test_answers_are_within_the_budget_and_above_their_bound(shape: str) -> None:
    for seed in range(5):
        problem = random_problem(seed, shape, memory=True)
        value, memory = joint_tables(problem)
        legal = memory[np.isfinite(value)]
        found = hull(problem)
        quantiles = np.quantile(legal, [0.0, 0.003, 0.05, 0.3, 1.0]).tolist()
        for number, budget in enumerate(quantiles):
            best = value[memory <= budget].min()
            solutions = [solve_within(problem, budget, found, seconds=0.0)]
            if number == seed % 5:
                solutions.append(solve(problem, budget))
                assert solutions[1].gap <= 0.005
            for solution in solutions:
                assert memory_of(problem, solution.choices) <= budget
                assert evaluate(problem, solution.choices) == solution.value
                assert solution.bound <= best * (1 + 1e-12)
                assert best <= solution.value * (1 + 1e-12)
            assert bound_at(found, budget) <= best
            at_once = bound_by_prices(problem, budget)
            assert at_once <= best
            assert number != 4 or at_once >= found.points[0].time * (1 - 1e-9)  # where all fit, the price is none
        assert bound_by_prices(problem, -1.0) == inf
        with pytest.raises(Infeasible) as raised:
            solve(problem, float(legal.min()) - 0.5)
        assert raised.value.least_memory == legal.min()
        assert bound_at(found, float(legal.min()) - 0.5) == inf


@pytest.mark.parametrize("shape", SHAPES)
def test_hull_is_the_convex_hull_of_all_choices(shape: str) -> None:
    for seed in range(10):
        problem = random_problem(seed, shape, memory=True)
        value, memory = joint_tables(problem)
        found = hull(problem, points=1000)
        finite = np.isfinite(value)
        points = sorted(zip(memory[finite].tolist(), value[finite].tolist(), strict=True))
        lower: list[tuple[float, float]] = []
        for point in points:
            while len(lower) > 1 and _turn(lower[-2], lower[-1], point) <= 1e-9:
                lower.pop()
            if not lower or point[0] > lower[-1][0]:
                lower.append(point)
        fastest = min(range(len(lower)), key=lambda index: (lower[index][1], index))
        expected = lower[: fastest + 1][::-1]
        assert [(point.memory, pytest.approx(point.time)) for point in found] == expected
        for budget, time in expected:
            assert bound_at(found, budget) == pytest.approx(time, rel=1e-9)


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def test_equal_layers_take_different_choices_where_the_budget_needs_it() -> None:
    """All layers together change at one price: without crossings, half of the budget would stay unused."""
    layers, cost, memory = 40, np.array([1.0, 2.0]), np.array([100.0, 10.0])
    change = np.array([[0.0, 0.01], [0.01, 0.0]])
    nodes = tuple(Node(f"layer{i}", cost, memory, i) for i in range(layers))
    problem = ChoiceProblem(nodes, tuple(Edge(i, i + 1, change) for i in range(layers - 1)))
    for few in (0, 1, 13, 39, 40):
        solution = solve_within(problem, few * 100.0 + (layers - few) * 10.0 + 5.0, seconds=0.0)
        assert sum(1 for choice in solution.choices if choice == 0) == few
        assert solution.value == pytest.approx(few + 2 * (layers - few) + 0.01 * (0 < few < layers))
        assert solution.gap < 0.005


@pytest.mark.long
def test_fixing_hubs_closes_gaps() -> None:
    closed = 0
    for seed in range(12):
        problem = layered(np.random.default_rng(seed), 4, interior=1, most=3, hubs=2, memory=True)
        value, memory = joint_tables(problem)
        swept = hull(problem)
        budget = (swept.points[0].memory + swept.least_memory) / 2
        best = value[memory <= budget].min()
        start = swept.fastest_within(budget)
        bound, price = line_at(swept, budget)
        root = Solution(start.choices, start.time, bound, "hull", price)
        found = branch(problem, budget, root, swept, points=32, most=20)
        assert memory_of(problem, found.choices) <= budget
        assert evaluate(problem, found.choices) == found.value <= root.value
        assert root.bound <= found.bound <= best * (1 + 1e-12)
        assert best <= found.value * (1 + 1e-12)
        closed += found.gap < root.gap / 2
    assert closed >= 4


def test_crossings_are_valued_as_they_are() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        problem = layered(random, 5, interior=1, most=4, hubs=1, memory=True)
        pick = [tuple(int(random.integers(size)) for size in problem.sizes) for _ in range(2)]
        first, second = (Point(evaluate(problem, c), memory_of(problem, c), c) for c in pick)
        budget = (first.memory + second.memory) / 2
        expected = inf
        for hub in (0, 1):
            for one, two in ((pick[0], pick[1]), (pick[1], pick[0])):
                loose = [node.group < 0 for node in problem.nodes]
                for cut in range(len(problem.nodes) + 1):
                    mixed = [(one, two)[hub if loose[i] else int(i < cut)][i] for i in range(len(problem.nodes))]
                    if memory_of(problem, mixed) <= budget:
                        expected = min(expected, evaluate(problem, mixed))
        found = best_crossing(problem, flatten(problem), first, second, budget)
        assert (inf if found is None else found.time) == pytest.approx(expected, rel=1e-12)


def _grid(seed: int, side: int, size: int) -> ChoiceProblem:
    random = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{i}", random.random(size), np.round(random.random(size) * 100)) for i in range(side * side))
    right = [(i, i + 1) for i in range(side * side) if (i + 1) % side]
    pairs = right + [(i, i + side) for i in range(side * side - side)]
    return ChoiceProblem(nodes, tuple(Edge(a, b, random.random((size, size)) * 0.5) for a, b in pairs))


def test_what_is_too_wide_goes_to_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _grid(1, 5, 4)
    best = eliminate(problem).value
    swept = hull(problem, points=8)
    budget = swept.points[len(swept) // 2].memory
    within = solve_within(problem, budget)
    monkeypatch.setattr(elimination, "CAP", 2**6)
    solution = solve(problem)
    assert solution.how in ("linear program", "integer program")
    assert solution.value == pytest.approx(best, rel=1e-9)
    assert solution.bound <= best * (1 + 1e-12)
    assert solution.gap < 1e-5
    found = solve(problem, budget)
    assert memory_of(problem, found.choices) <= budget
    assert within.bound * (1 - 1e-5) <= found.value <= within.value * (1 + 1e-9)
    with pytest.raises(Infeasible) as raised:
        solve(problem, swept.least_memory - 1.0)
    assert raised.value.least_memory == swept.least_memory
    assert relax(problem).bound <= best


def test_the_same_problem_has_the_same_answer() -> None:
    problem, again = (layered(np.random.default_rng(9), 9, interior=2, most=4, hubs=1, memory=True) for _ in range(2))
    found = hull(problem)
    budget = (found.points[0].memory + found.least_memory) / 2
    assert solve(problem, budget) == solve(again, budget)
    assert solve(problem) == solve(again)
    assert tuple(hull(again)) == tuple(found)


def test_choices_of_nodes_without_memory_are_always_within() -> None:
    problem = random_problem(0, "chain")
    assert solve(problem, 0.0).value == eliminate(problem).value
