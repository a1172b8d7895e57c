"""Elimination and folding against trying everything."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from nnscaler.planning.solver.equal_layer_runs import find_runs
from nnscaler.planning.solver.fold_equal_layers import find_structure, min_marginal, solve_folded
from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Infeasible, Node, TooWide, evaluate
from nnscaler.planning.solver.variable_elimination import find_order
from tests.nnscaler.planning.solver.flat import eliminate
from tests.nnscaler.planning.solver.problems import SHAPES, joint_tables, layered, random_problem
from tests.sampling import every


@pytest.mark.parametrize("shape", every(2, SHAPES))
def test_optimum_and_marginals_are_those_of_trying_everything(shape: str) -> None:
    for seed in range(40):
        problem = random_problem(seed, shape)
        value, _ = joint_tables(problem)
        for solution in (eliminate(problem), solve_folded(problem)):
            assert solution.value == pytest.approx(value.min(), rel=1e-12)
            assert solution.bound <= value.min() * (1 + 1e-12)
            assert evaluate(problem, solution.choices) == solution.value
        for index in range(value.ndim):
            expected = value.min(axis=tuple(axis for axis in range(value.ndim) if axis != index))
            np.testing.assert_allclose(min_marginal(problem, index), expected, rtol=1e-12)


@pytest.mark.parametrize("hubs", [0, 1, 2])
@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("period", [1, 2, 3])
def test_folding_finds_the_unfolded_optimum(hubs: int, cuts: int, period: int) -> None:
    for layers in (1, 2, 3, 4, 7, 12, 13, 30):
        random = np.random.default_rng([layers, hubs, cuts, period])
        problem = layered(random, layers, interior=3, most=4, hubs=hubs, cuts=cuts, period=period)
        folded, flat = solve_folded(problem), eliminate(problem)
        assert folded.value == pytest.approx(flat.value, rel=1e-12)
        if layers >= 7 * period:
            runs = find_runs(problem)
            assert sum(len(run.segments) * period for run in runs) >= layers - 1 - 2 * period
            assert folded.how == "folding"
            assert len(find_structure(problem).nodes) < len(problem.nodes) - (layers - 3 * period) * 3


def by_fixing(problem: ChoiceProblem, node: int) -> list[float]:
    """The optimum with a node fixed to each of its strategies, one after the other."""
    found = []
    for k in range(len(problem.nodes[node].cost)):
        nodes = list(problem.nodes)
        only = np.where(np.arange(len(nodes[node].cost)) == k, nodes[node].cost, inf)
        nodes[node] = Node(nodes[node].name, only, None, nodes[node].group)
        try:
            found.append(eliminate(ChoiceProblem(tuple(nodes), problem.edges)).value)
        except Infeasible:
            found.append(inf)
    return found


def test_marginal_of_one_node_in_a_folded_problem() -> None:
    random = np.random.default_rng(5)
    problem = layered(random, 12, interior=2, most=5, hubs=1, memory=True)
    assert solve_folded(problem).how == "folding"
    for node in (0, 1, 2, 3, 4, 20, len(problem.nodes) - 2, len(problem.nodes) - 1):
        np.testing.assert_allclose(min_marginal(problem, node), by_fixing(problem, node), rtol=1e-12)
    price = 0.01
    nodes = [Node(n.name, n.cost + price * n.memory, None, n.group) for n in problem.nodes if n.memory is not None]
    expected = by_fixing(ChoiceProblem(tuple(nodes), problem.edges), 7)
    np.testing.assert_allclose(min_marginal(problem, 7, price), expected, rtol=1e-12)


def test_equal_arrays_fold_like_the_same_arrays() -> None:
    shared = layered(np.random.default_rng(3), 9, interior=2, most=4)
    nodes = tuple(Node(node.name, node.cost.copy(), None, node.group) for node in shared.nodes)
    copied = ChoiceProblem(nodes, tuple(Edge(edge.first, edge.second, edge.cost.copy()) for edge in shared.edges))
    assert find_runs(copied) == find_runs(shared) != ()


def test_a_layer_that_differs_parts_the_run() -> None:
    same = layered(np.random.default_rng(4), 12, interior=2, most=4)
    middle = next(index for index, node in enumerate(same.nodes) if node.group == 6)
    nodes = list(same.nodes)
    nodes[middle] = Node("other", nodes[middle].cost + 1.0, None, 6)
    problem = ChoiceProblem(tuple(nodes), same.edges)
    assert [len(run.segments) for run in find_runs(problem)] == [5, 4]  # the ends of the stack touch other nodes
    assert solve_folded(problem).value == pytest.approx(eliminate(problem).value, rel=1e-12)


def test_an_edge_between_distant_layers_keeps_them_flat() -> None:
    plain = layered(np.random.default_rng(6), 14, interior=2, most=3)
    groups = [next(i for i, node in enumerate(plain.nodes) if node.group == layer) for layer in range(14)]
    table = np.random.default_rng(0).random((len(plain.nodes[groups[4]].cost), len(plain.nodes[groups[9]].cost)))
    problem = ChoiceProblem(plain.nodes, (*plain.edges, Edge(groups[4], groups[9], table)))
    folded = {node for run in find_runs(problem) for segment in run.segments[1:] for node in segment}
    assert folded and not folded & {groups[4], groups[9]}
    assert solve_folded(problem).value == pytest.approx(eliminate(problem).value, rel=1e-12)


def test_a_layer_that_later_ones_read_is_a_hub() -> None:
    """An encoder of equal layers, whose last one is read by all the equal layers of a decoder."""
    stack = layered(np.random.default_rng(8), 16, interior=2, most=3)
    read = max(index for index, node in enumerate(stack.nodes) if node.group == 7)
    firsts = [next(i for i, node in enumerate(stack.nodes) if node.group == layer) for layer in range(8, 16)]
    table = np.random.default_rng(1).random((len(stack.nodes[read].cost), len(stack.nodes[firsts[0]].cost)))
    problem = ChoiceProblem(stack.nodes, (*stack.edges, *(Edge(read, first, table) for first in firsts)))
    hubs = [run.hubs for run in find_runs(problem)]
    assert hubs == [(), (read,)]
    assert solve_folded(problem).value == pytest.approx(eliminate(problem).value, rel=1e-12)


def test_no_legal_choice_is_infeasible() -> None:
    nodes = (Node("a", np.array([0.0, inf])), Node("b", np.array([0.0, 1.0])))
    problem = ChoiceProblem(nodes, (Edge(0, 1, np.array([[inf, inf], [0.0, 0.0]])),))
    with pytest.raises(Infeasible) as raised:
        eliminate(problem)
    assert raised.value.least_memory == inf


def test_too_wide_is_said_before_any_table_is_made() -> None:
    count = 14
    scopes = [(i, j) for i in range(count) for j in range(i)]
    with pytest.raises(TooWide) as raised:
        find_order(scopes, range(count), [4] * count)
    assert raised.value.log2_entries == 2 * count


def test_nodes_without_edges_and_parts_apart() -> None:
    nodes = tuple(Node(f"n{i}", np.array([3.0, 1.0 + i])) for i in range(4))
    problem = ChoiceProblem(nodes, (Edge(0, 1, np.array([[0.0, 9.0], [9.0, 9.0]])),))
    assert eliminate(problem).choices == (0, 0, 0, 0)
    assert [list(min_marginal(problem, n)) for n in range(4)] == [[12, 18], [12, 18], [12, 12], [12, 13]]


def test_more_neighbours_with_one_choice_than_a_table_has_axes() -> None:
    nodes = (Node("hub", np.zeros(1)), *(Node(f"n{i}", np.ones(1)) for i in range(80)))
    edges = tuple(Edge(0, i + 1, np.full((1, 1), 2.0)) for i in range(80))
    solution = eliminate(ChoiceProblem(nodes, edges))
    assert solution.value == 240.0 and solution.choices == (0,) * 81
