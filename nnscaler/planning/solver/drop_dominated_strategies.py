"""Drop strategies that no optimum needs: forbidden ones, and those that another one of the node dominates.

Dead-end elimination (Desmet et al. 1992; Goldstein 1994): strategy a goes where changing it to b is never a loss,
whatever the neighbours choose. With memory, b must not need more of it either, so that no optimum under any budget is
lost.

It is done in rounds, each of which looks at what the round before has left: nodes that look alike then stay alike, are
looked at once, and equal layers stay equal layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.problem import ChoiceProblem, Edge, Infeasible, Node, Table

Alive = NDArray[np.bool_]
Pairs = Mapping[tuple[int, int], Table]


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """A smaller problem.

    problem   with the kept strategies
    kept      by node, the numbers of its strategies in the larger problem
    """

    problem: ChoiceProblem
    kept: tuple[NDArray[np.intp], ...]

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices in the larger problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.kept, choices, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Criteria:
    """The figures of a node that a change of its strategy may not raise. Nodes are alike where these are the same
    objects.

    costs   [strategies, ways to count]
    needs   [strategies, resources]
    often   [ways to count]: how often the tables of the edges count beside each column of costs; None: once
    """

    costs: Table
    needs: Table
    often: Table | None = None


def reduce_problem(problem: ChoiceProblem, memory: bool = False) -> Reduced:
    """Return `problem` without forbidden and dominated strategies, and with one edge per pair of nodes.

    Raises `Infeasible` where a node loses all its strategies, which shows that no choice is legal.
    """
    pairs = merge_edges(problem.edges)
    made: dict[tuple[int, int], Criteria] = {}
    for node in problem.nodes:
        need = node.memory if memory else None
        if (id(node.cost), id(need)) not in made:
            needs = np.zeros((len(node.cost), 0)) if need is None else need[:, None]
            made[id(node.cost), id(need)] = Criteria(node.cost[:, None], needs)
    criteria = [made[id(node.cost), id(node.memory if memory else None)] for node in problem.nodes]
    kept = survivors(criteria, pairs)
    return Reduced(_cut(problem, pairs, kept), kept)


def restrict(problem: ChoiceProblem, kept: Sequence[NDArray[np.intp]]) -> Reduced:
    """Return `problem` with only the `kept` strategies of each node."""
    return Reduced(_cut(problem, merge_edges(problem.edges), kept), tuple(kept))


def merge_edges(edges: Iterable[Edge]) -> dict[tuple[int, int], Table]:
    """Return the sum of the tables of each pair of nodes, by (smaller index, larger index).

    Single tables stay the same arrays, and sums of the same tables are the same array.
    """
    found: dict[tuple[int, int], list[Table]] = {}
    flipped: dict[int, Table] = {}
    for edge in edges:
        table = edge.cost
        if edge.first > edge.second:
            table = flipped.setdefault(id(edge.cost), edge.cost.T)
        found.setdefault((min(edge.first, edge.second), max(edge.first, edge.second)), []).append(table)
    sums: dict[tuple[int, ...], Table] = {}
    for tables in found.values():
        key = tuple(map(id, tables))
        if key not in sums:
            sums[key] = tables[0] if len(tables) == 1 else np.sum(tables, axis=0)
    return {pair: sums[tuple(map(id, tables))] for pair, tables in found.items()}


def survivors(criteria: Sequence[Criteria], pairs: Pairs, fixed: Collection[int] = ()) -> tuple[NDArray[np.intp], ...]:
    """Return the strategies that every node keeps.

    `pairs` has the table of each pair of nodes that share one. The nodes in `fixed` keep all their strategies. Raises
    `Infeasible` where a node keeps none.
    """
    near: list[list[tuple[int, Table]]] = [[] for _ in criteria]
    flipped: dict[int, Table] = {}
    for (first, second), table in pairs.items():
        if id(table) not in flipped:
            flipped[id(table)] = np.ascontiguousarray(table.T)
        near[first].append((second, table))
        near[second].append((first, flipped[id(table)]))
    masks = _Masks()
    # by node, [strategies]: all; those whose own costs are finite; and the number of that set
    every = [np.ones(len(own.costs), np.bool_) for own in criteria]
    legal = [mask if i in fixed else mask & np.isfinite(criteria[i].costs).all(axis=1) for i, mask in enumerate(every)]
    state = [masks.number(mask) for mask in legal]
    known: dict[tuple[object, ...], int] = {}
    waiting = [index for index in range(len(criteria)) if index not in fixed]
    while waiting:
        changed: dict[int, int] = {}
        for index in waiting:
            own, around = criteria[index], near[index]
            key = (id(own), state[index], *((id(table), state[other]) for other, table in around))
            if key not in known:
                tables = [table[:, masks.listed[state[other]]] for other, table in around]
                known[key] = masks.number(_left(own, masks.listed[state[index]], tables))
            if known[key] != state[index]:
                changed[index] = known[key]
        for index, number in changed.items():
            state[index] = number
        again = {other for index in changed for other, _ in near[index]}
        waiting = sorted(again.difference(fixed))
    return tuple(np.flatnonzero(masks.listed[number]) for number in state)


@dataclass(frozen=True, slots=True)
class _Masks:
    """Numbers for sets of strategies: equal sets have the same one."""

    listed: list[Alive] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, mask: Alive) -> int:
        if not mask.any():
            raise Infeasible(inf)
        found = self._numbers.setdefault(mask.tobytes(), len(self.listed))
        if found == len(self.listed):
            self.listed.append(mask)
        return found


def _left(own: Criteria, alive: Alive, tables: Sequence[Table]) -> Alive:
    """Return the strategies that every neighbour can go with, without those that are dominated.

    `tables` are [strategies, strategies of a neighbour that are left], one per neighbour.
    """
    left = alive.copy()
    for table in tables:
        left &= np.isfinite(table).any(axis=1)
    return _undominated(own, left, tables) if left.sum() > 1 else left


def _undominated(own: Criteria, left: Alive, tables: Sequence[Table]) -> Alive:
    """Drop dominated strategies one by one, each for one that stays at that time, the last ones first: of equals, the
    first one stays."""
    # [strategies left], then [a, b] for every pair of them
    numbers = np.flatnonzero(left)
    costs, needs = own.costs[numbers], own.needs[numbers]
    between = np.zeros((len(numbers), len(numbers)))  # at least this is won at the edges by changing a to b
    for table in tables:
        # [strategies left, strategies of the neighbour]; then [a, b, strategies of the neighbour]: what a costs more
        # than b
        part = table[numbers]
        closed = ~np.isfinite(part)
        finite = np.where(closed, 0.0, part)
        difference = finite[:, None, :] - finite[None, :, :]
        difference[closed[:, None, :] & np.ones_like(closed)[None, :, :]] = inf  # a is not possible there
        difference[closed[None, :, :] & ~closed[:, None, :]] = -inf  # b is not possible where a is
        between += difference.min(axis=2)
    # [a, b]: at least this is won in each way to count, where b is possible wherever a is
    often = np.ones(costs.shape[1]) if own.often is None else own.often
    won = costs[:, None] - costs[None, :]  # [a, b, ways]
    finite = np.isfinite(between)
    loss = (won + np.where(finite, between, 0.0)[:, :, None] * often).min(axis=2)
    loss[~finite | (needs[:, None] < needs[None, :]).any(axis=2)] = -inf
    np.fill_diagonal(loss, -inf)
    stays = np.ones(len(numbers), np.bool_)
    for a in range(len(numbers) - 1, -1, -1):
        if (loss[a, stays] >= 0.0).any():
            stays[a] = False
    answer = np.zeros_like(left)
    answer[numbers[stays]] = True
    return answer


def _cut(problem: ChoiceProblem, pairs: Pairs, kept: Sequence[NDArray[np.intp]]) -> ChoiceProblem:
    """Return the problem with the kept strategies only; arrays that were shared stay so where what is kept is the
    same."""
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
    return ChoiceProblem(nodes, tuple(edge for edge in edges if edge.cost.any()))
