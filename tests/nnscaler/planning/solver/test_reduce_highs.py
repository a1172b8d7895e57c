"""Reduction, the linear and the integer program against trying everything."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest

from nnscaler.planning.solver import highs
from nnscaler.planning.solver import solve as front
from nnscaler.planning.solver.drop_dominated_strategies import reduce_problem
from nnscaler.planning.solver.highs import optimise, relax
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Infeasible, Node, evaluate, memory_of
from nnscaler.planning.solver.solve import solve
from tests.nnscaler.planning.solver.flat import eliminate
from tests.nnscaler.planning.solver.problems import SHAPES, joint_tables, layered, random_problem
from tests.sampling import every


@pytest.mark.long
@pytest.mark.parametrize("shape", every(2, SHAPES))
def test_programs_and_reduction_keep_the_optimum(shape: str) -> None:
    for seed in range(40):
        problem = random_problem(seed, shape)
        value, _ = joint_tables(problem)
        reduced = reduce_problem(problem)
        solution = eliminate(reduced.problem)
        assert evaluate(problem, reduced.restore(solution.choices)) == pytest.approx(value.min(), rel=1e-12)
        found = optimise(problem)
        assert found is not None
        assert found.value == pytest.approx(value.min(), rel=1e-9)
        assert value.min() * (1 - 1e-5) <= found.bound <= value.min()
        assert relax(problem).bound <= value.min() * (1 + 1e-12)


def test_relaxation_of_a_tree_is_tight() -> None:
    for seed in range(10):
        problem = random_problem(seed, "tree")
        assert relax(problem).bound == pytest.approx(eliminate(problem).value, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_reduction_with_memory_keeps_the_optimum_of_every_budget(shape: str) -> None:
    removed = 0
    for seed in range(12):
        problem = random_problem(seed, shape, memory=True)
        reduced = reduce_problem(problem, memory=True)
        removed += sum(problem.sizes) - sum(reduced.problem.sizes)
        value, memory = joint_tables(problem)
        left, left_memory = joint_tables(reduced.problem)
        for budget in np.quantile(memory[np.isfinite(value)], [0.0, 0.01, 0.1, 0.5, 1.0]):
            best = value[memory <= budget].min(initial=inf)
            assert left[left_memory <= budget].min(initial=inf) == pytest.approx(best, rel=1e-12)
    assert removed > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_programs_with_memory(shape: str) -> None:
    for seed in range(8):
        problem = random_problem(seed, shape, memory=True)
        value, memory = joint_tables(problem)
        budget = float(np.quantile(memory[np.isfinite(value)], 0.02))
        best = value[memory <= budget].min()
        found = optimise(problem, budget)
        assert found is not None
        assert memory_of(problem, found.choices) <= budget
        assert found.value == pytest.approx(best, rel=1e-9)
        relaxed = relax(problem, budget)
        assert relaxed.bound <= best * (1 + 1e-12)
        assert relaxed.multiplier >= 0.0
        assert found.bound <= best


def test_a_program_begins_with_a_start() -> None:
    problem = random_problem(3, "skips")
    best = eliminate(problem)
    found = optimise(problem, start=best.choices)
    assert found is not None and found.value == pytest.approx(best.value, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_reduced_first_has_the_same_optimum(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        problem = random_problem(seed, shape)
        plain = solve(problem)
        with monkeypatch.context() as patch:
            patch.setattr(front, "WORTH", 0.0)
            reduced = solve(problem)
        assert plain.value == pytest.approx(reduced.value, rel=1e-12) == evaluate(problem, reduced.choices)
        assert reduced.bound <= reduced.value


def test_equal_layers_stay_equal_when_they_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered(np.random.default_rng(5), 40, interior=4, most=6, hubs=1, cuts=2)
    monkeypatch.setattr(front, "WORTH", 0.0)
    found = solve(problem)
    assert found.how == "folding" and found.value == pytest.approx(eliminate(problem).value, rel=1e-12)


def test_reduction_keeps_arrays_shared() -> None:
    problem = layered(np.random.default_rng(2), 20, interior=2, most=5)
    reduced = reduce_problem(problem).problem
    assert len({id(edge.cost) for edge in reduced.edges}) < len(reduced.edges) // 2


def test_edges_of_one_pair_become_one() -> None:
    nodes = (Node("a", np.zeros(2)), Node("b", np.zeros(3)))
    one, two = np.arange(6.0).reshape(2, 3)[:, ::-1].copy(), np.arange(6.0).reshape(3, 2)
    problem = ChoiceProblem(nodes, (Edge(0, 1, one), Edge(1, 0, two)))
    value, _ = joint_tables(problem)
    assert eliminate(problem).value == value.min() == 2.0
    assert len(reduce_problem(problem).problem.edges) <= 1


def test_nothing_legal_is_infeasible() -> None:
    closed = Edge(0, 1, np.full((2, 2), inf))
    problem = ChoiceProblem((Node("a", np.zeros(2)), Node("b", np.zeros(2))), (closed,))
    with pytest.raises(Infeasible):
        reduce_problem(problem)
    with pytest.raises(Infeasible):
        optimise(problem)
    with pytest.raises(Infeasible):
        relax(problem)


def test_ctrl_c_ends_an_integer_program(ctrl_c: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take many minutes."""
    run = highs._run
    monkeypatch.setattr(highs, "_run", lambda solver: (ctrl_c(), run(solver)))
    random = np.random.default_rng(3)
    side, size = 26, 8
    nodes = tuple(Node(f"n{i}", random.random(size), np.zeros(size)) for i in range(side * side))
    right = [(i, i + 1) for i in range(side * side) if (i + 1) % side]
    pairs = right + [(i, i + side) for i in range(side * side - side)]
    problem = ChoiceProblem(nodes, tuple(Edge(a, b, random.random((size, size)) * 0.5) for a, b in pairs))
    with pytest.raises(KeyboardInterrupt):
        optimise(problem, None, 3600.0)
