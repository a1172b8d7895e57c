"""Removes strategies that no optimum needs: forbidden ones, and those that another one of the node dominates.

Dead-end elimination (Goldstein 1994): strategy a goes where changing it to b is never a loss, whatever the neighbours
choose. With memory, b must not need more of it either, so that no optimum under any budget is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.problem import Edge, Infeasible, Node, Problem, Table

Alive = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """The smaller problem, and the strategies (numbers in the larger problem) that each node kept."""

    problem: Problem
    kept: tuple[NDArray[np.intp], ...]

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The choices in the larger problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))


def reduce_problem(problem: Problem, memory: bool = False) -> Reduced:
    """`problem` without forbidden and dominated strategies, and with one edge per pair of nodes.

    Raises `Infeasible` where a node loses all its strategies, which shows that no choice is legal.
    """
    pairs = merge_edges(problem.edges)
    near: list[list[tuple[int, Table]]] = [[] for _ in problem.nodes]
    flipped: dict[int, Table] = {}
    for (first, second), table in pairs.items():
        if id(table) not in flipped:
            flipped[id(table)] = np.ascontiguousarray(table.T)
        near[first].append((second, table))
        near[second].append((first, flipped[id(table)]))
    alive = [np.isfinite(node.cost) for node in problem.nodes]
    waiting = dict.fromkeys(range(len(alive)))  # in the order of arrival
    while waiting:
        index = next(iter(waiting))
        del waiting[index]
        left = _allowed(index, alive, near[index])
        if left.sum() > 1:
            left = _undominated(problem.nodes[index], left, alive, near[index], memory)
        if not left.any():
            raise Infeasible(inf)
        if (left != alive[index]).any():
            alive[index] = left
            waiting.update(dict.fromkeys(other for other, _ in near[index]))
    kept = tuple(np.flatnonzero(mask) for mask in alive)
    return Reduced(_cut(problem, pairs, kept), kept)


def restrict(problem: Problem, kept: Sequence[NDArray[np.intp]]) -> Reduced:
    """`problem` with only the `kept` strategies of each node."""
    return Reduced(_cut(problem, merge_edges(problem.edges), kept), tuple(kept))


def merge_edges(edges: Iterable[Edge]) -> dict[tuple[int, int], Table]:
    """The sum of the tables of each pair of nodes, by (smaller index, larger index). Single tables stay the same."""
    found: dict[tuple[int, int], list[Table]] = {}
    flipped: dict[int, Table] = {}
    for edge in edges:
        table = edge.cost
        if edge.first > edge.second:
            table = flipped.setdefault(id(edge.cost), edge.cost.T)
        found.setdefault((min(edge.first, edge.second), max(edge.first, edge.second)), []).append(table)
    return {pair: tables[0] if len(tables) == 1 else np.sum(tables, axis=0) for pair, tables in found.items()}


def _allowed(index: int, alive: Sequence[Alive], near: Sequence[tuple[int, Table]]) -> Alive:
    """The strategies that every neighbour can go with."""
    left = alive[index].copy()
    for other, table in near:
        left &= np.isfinite(table[:, alive[other]]).any(axis=1)
    return left


def _undominated(
    node: Node, left: Alive, alive: Sequence[Alive], near: Sequence[tuple[int, Table]], memory: bool
) -> Alive:
    """What is left when dominated strategies go one by one, each for one that stays at that time."""
    numbers = np.flatnonzero(left)
    cost = node.cost[numbers]
    loss = cost[:, None] - cost[None, :]  # at least this is won by changing a to b
    if memory and node.memory is not None:
        need = node.memory[numbers]
        loss[need[:, None] < need[None, :]] = -inf
    for other, table in near:
        part = table[np.ix_(numbers, np.flatnonzero(alive[other]))]
        closed = ~np.isfinite(part)
        finite = np.where(closed, 0.0, part)
        difference = finite[:, None, :] - finite[None, :, :]
        difference[closed[:, None, :] & np.ones_like(closed)[None, :, :]] = inf  # a is not possible there
        difference[closed[None, :, :] & ~closed[:, None, :]] = -inf  # b is not possible where a is
        loss += difference.min(axis=2)
    np.fill_diagonal(loss, -inf)
    stays = np.ones(len(numbers), np.bool_)
    for a in range(len(numbers)):
        if (loss[a, stays] >= 0.0).any():
            stays[a] = False
    answer = np.zeros_like(left)
    answer[numbers[stays]] = True
    return answer


def _cut(problem: Problem, pairs: dict[tuple[int, int], Table], kept: Sequence[NDArray[np.intp]]) -> Problem:
    """The problem with the kept strategies only; arrays that were shared stay so where what is kept is the same."""
    found: dict[tuple[int, bytes, bytes], Table] = {}

    def cut(table: Table, *axes: NDArray[np.intp]) -> Table:
        key = (id(table), axes[0].tobytes(), axes[-1].tobytes())
        if key not in found:
            found[key] = table[np.ix_(*axes)]
        return found[key]

    nodes = tuple(
        Node(node.name, cut(node.cost, keep), None if node.memory is None else cut(node.memory, keep), node.group)
        for node, keep in zip(problem.nodes, kept, strict=True)
    )
    edges = (Edge(a, b, cut(table, kept[a], kept[b])) for (a, b), table in pairs.items())
    return Problem(nodes, tuple(edge for edge in edges if edge.cost.any()))
