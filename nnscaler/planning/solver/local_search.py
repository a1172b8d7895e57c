"""Improve choices within a budget of memory by local search.

Equal layers change together at one price of memory, so that hull points lie far apart. Between two points lie their
crossings: the nodes up to some place take the choices of one, the nodes behind it those of the other. For equal layers
this is "the last r of L layers take the cheaper neighbour". Memory that is then left goes to single nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.problem import ChoiceProblem, Table, evaluate, memory_of
from nnscaler.planning.solver.sweep_memory_price import Hull, Point, bound_at

# All tables of a problem end to end in one array, so that many choices are looked up at once.

Indices = NDArray[np.int_]


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """All tables of a problem end to end, and where each begins.

    cost           costs of nodes
    cost_start     [nodes]: where each node's table begins in `cost`
    memory         memory of nodes
    memory_start   [nodes]: where each node's table begins in `memory`
    edge           costs of edges
    edge_start     [edges]: where each edge's table begins in `edge`
    first          [edges]: index of its first node
    second         [edges]: index of its second node
    width          [edges]: number of columns of its table
    loose          [nodes]: whether it is of no layer
    """

    cost: Table
    cost_start: Indices
    memory: Table
    memory_start: Indices
    edge: Table
    edge_start: Indices
    first: Indices
    second: Indices
    width: Indices
    loose: NDArray[np.bool_]  # nodes of no layer

    def cost_of(self, choices: Indices) -> Table:
        """Return the cost of each node: [nodes]."""
        found: Table = self.cost[self.cost_start + choices]
        return found

    def memory_of(self, choices: Indices) -> Table:
        """Return the memory of each node: [nodes]."""
        found: Table = self.memory[self.memory_start + choices]
        return found

    def edge_cost_of(self, first: Indices, second: Indices) -> Table:
        """Return the cost of each edge, whose nodes choose `first` and `second`: all [edges]."""
        found: Table = self.edge[self.edge_start + first * self.width + second]
        return found


def flatten(problem: ChoiceProblem) -> Flat:
    """Return the tables of `problem` as a `Flat`."""
    none = np.zeros(max(problem.sizes, default=0))
    cost, cost_start = _end_to_end(node.cost for node in problem.nodes)
    memory, memory_start = _end_to_end(none if node.memory is None else node.memory for node in problem.nodes)
    edge, edge_start = _end_to_end(edge.cost for edge in problem.edges)
    first = np.array([edge.first for edge in problem.edges], np.int_)
    second = np.array([edge.second for edge in problem.edges], np.int_)
    width = np.array([edge.cost.shape[1] for edge in problem.edges], np.int_)
    loose = np.array([node.group < 0 for node in problem.nodes])
    return Flat(cost, cost_start, memory, memory_start, edge, edge_start, first, second, width, loose)


def _end_to_end(tables: Iterable[Table]) -> tuple[Table, Indices]:
    """Return the distinct tables in one array, and the place at which each of `tables` begins."""
    places: dict[int, int] = {}
    parts: list[Table] = []
    starts: list[int] = []
    end = 0
    for table in tables:
        if id(table) not in places:
            places[id(table)] = end
            parts.append(table.ravel())
            end += table.size
        starts.append(places[id(table)])
    return np.concatenate(parts) if parts else np.zeros(0), np.array(starts, np.int_)


ROUNDS = 8  # of crossings, and of passes over single nodes
NEAR = 4  # efficient points on each side of the budget that are crossed with the best
LEAST = 1e-9  # relative: smaller gains are rounding


def repair_from(problem: ChoiceProblem, swept: Hull, budget: float) -> Point:
    """Return the best point within `budget` that crossings of the points of a hull lead to. Raises `Infeasible`."""
    start = swept.fastest_within(budget)
    place = swept.points.index(start)
    if place == 0 or start.time <= bound_at(swept, budget):
        return start
    near = swept.points[max(0, place - NEAR) : place][::-1] + swept.points[place + 1 : place + 1 + NEAR]
    return repair(problem, start, near, budget)


def repair(problem: ChoiceProblem, start: Point, others: Iterable[Point], budget: float) -> Point:
    """Return the best point within `budget` that crossings of `start`, which is within, and single changes lead to."""
    best = start
    others = tuple(others)
    flat = flatten(problem)
    for _ in range(ROUNDS):
        before = best.time
        for other in others:
            crossed = best_crossing(problem, flat, best, other, budget)
            if crossed is not None and crossed.time < best.time:
                best = crossed
        best = change_single_nodes(problem, best, budget)
        if best.time >= before - LEAST * abs(before):
            break
    return best


def best_crossing(problem: ChoiceProblem, flat: Flat, first: Point, second: Point, budget: float) -> Point | None:
    """Return the fastest crossing of two points within `budget`; nodes of no layer all follow one of the two."""
    count = len(problem.nodes)
    variants = [np.arange(count)]
    if flat.loose.any() and not flat.loose.all():
        variants = [np.where(flat.loose, side, variants[0]) for side in (-1, count)]
    pairs = [(np.array(a.choices), np.array(b.choices)) for a, b in ((first, second), (second, first))]
    found: list[tuple[float, int, int, int]] = []
    for variant, places in enumerate(variants):
        for direction, (behind, ahead) in enumerate(pairs):
            times, memory = _along(flat, places, behind, ahead)
            times[memory > budget] = np.inf
            cut = int(times.argmin())
            found.append((float(times[cut]), variant, direction, cut))
    for _, variant, direction, cut in sorted(found):
        behind, ahead = pairs[direction]
        choices = tuple(np.where(variants[variant] < cut, ahead, behind).tolist())
        point = Point(evaluate(problem, choices), memory_of(problem, choices), choices)
        if np.isfinite(point.time) and point.memory <= budget:
            return point
    return None


def change_single_nodes(problem: ChoiceProblem, start: Point, budget: float) -> Point:
    """Return the point after changes of one node at a time that gain time within `budget`, the best of each node
    first."""
    near: list[list[tuple[int, Table]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.first].append((edge.second, edge.cost))
        near[edge.second].append((edge.first, edge.cost.T))
    choices = list(start.choices)
    left = budget - start.memory
    least = LEAST * abs(start.time)
    waiting: Iterable[int] = range(len(choices))
    for _ in range(ROUNDS):
        touched: set[int] = set()
        freed = False
        for index in waiting:
            cost, more = _changes(problem, near[index], choices, index)
            cost[more > left] = np.inf
            best = int(cost.argmin())
            if best != choices[index] and cost[best] < cost[choices[index]] - least:
                left -= float(more[best])
                freed = freed or more[best] < 0.0
                choices[index] = best
                touched.update(other for other, _ in near[index])
        waiting = range(len(choices)) if freed else sorted(touched)
        if not touched and not freed:
            break
    point = Point(evaluate(problem, choices), memory_of(problem, choices), tuple(choices))
    return point if point.memory <= budget and point.time < start.time else start


def _changes(
    problem: ChoiceProblem, near: Sequence[tuple[int, Table]], choices: Sequence[int], index: int
) -> tuple[Table, Table]:
    """Return the cost of each strategy of a node, its neighbours as they are, and the memory that it needs more: both
    [k]."""
    node = problem.nodes[index]
    cost = node.cost.copy()
    for other, table in near:
        cost += table[:, choices[other]]
    if node.memory is None:
        return cost, np.zeros(len(cost))
    return cost, node.memory - node.memory[choices[index]]


def _along(flat: Flat, places: Indices, behind: Indices, ahead: Indices) -> tuple[Table, Table]:
    """Return time and memory of the crossings at 0, 1, ... n: nodes with a place before the crossing choose `ahead`."""
    count = len(places)
    # [edges]: whether the second node comes first, and the places of the earlier and the later node
    swap = places[flat.first] > places[flat.second]
    near = np.where(swap, places[flat.second], places[flat.first])
    far = np.where(swap, places[flat.first], places[flat.second])

    def edges(of_near: Indices, of_far: Indices) -> Table:
        first = np.where(swap, of_far[flat.first], of_near[flat.first])
        second = np.where(swap, of_near[flat.second], of_far[flat.second])
        return flat.edge_cost_of(first, second)

    zero, last = np.zeros(1, np.int_), np.full(1, count)
    # (values, first and last crossing at which each counts)
    parts = (
        (flat.cost_of(behind), zero, places),
        (flat.cost_of(ahead), places + 1, last),
        (edges(behind, behind), zero, near),
        (edges(ahead, behind), near + 1, far),
        (edges(ahead, ahead), far + 1, last),
    )
    # [crossings]: the sum of finite values, and how many infinite ones there are
    times, closed = np.zeros(count + 1), np.zeros(count + 1)
    for values, first, end in parts:
        finite = np.isfinite(values)
        times += _sums(np.where(finite, values, 0.0), first, end, count)
        closed += _sums((~finite).astype(np.float64), first, end, count)
    times[closed > 0.5] = np.inf
    memory = _sums(flat.memory_of(behind), zero, places, count) + _sums(flat.memory_of(ahead), places + 1, last, count)
    return times, memory


def _sums(values: Table, first: Indices, last: Indices, count: int) -> Table:
    """Return, for 0, 1, ... count, the sum of the values whose range `first` to `last`, which may be empty, contains
    it."""
    first, last = (np.broadcast_to(ends, values.shape) for ends in (first, np.minimum(last, count)))
    some = first <= last
    # a value is added where its range begins and taken away behind its end; the running sum is what is asked for
    begins = np.bincount(first[some], values[some], minlength=count + 2)
    stops = np.bincount(last[some] + 1, values[some], minlength=count + 2)
    answer: Table = np.cumsum(begins - stops)[: count + 1]
    return answer
