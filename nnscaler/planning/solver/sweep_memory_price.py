"""Sweep the price of memory over exact solves, for the efficient points of time against memory.

At a price per unit of memory, the optimum of time + price * memory is a point of the lower convex hull, and a line that
no choice lies below: the Lagrangian bound for every budget (Everett 1963). A segment of the hull is tried at its own
slope, and is an edge of the hull when nothing lies below (the dichotomic search of Aneja and Nair 1979).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from nnscaler.planning.solver.fold_equal_layers import Structure, best_choices, find_structure, priced, tables_of
from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Table, evaluate, memory_of

ROUNDING = 1e-12  # relative: by how much sums of tables may differ in their last digits
STEEP = 1e6  # first price, in slopes of the whole hull: nothing but the least memory pays at it


class Point(NamedTuple):
    """A choice of strategies.

    time      its value
    memory    its memory
    choices   one strategy per node
    """

    time: float
    memory: float
    choices: tuple[int, ...]


class SupportLine(NamedTuple):
    """No choice has time + price * memory below `value`."""

    price: float
    value: float


@dataclass(frozen=True, slots=True)
class Hull:
    """Efficient points and the bounds that were found on the way.

    points   from the fastest to the one of least memory
    lines    by price: no choice lies below them
    """

    points: tuple[Point, ...]
    lines: tuple[SupportLine, ...]

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    @property
    def least_memory(self) -> float:
        """The smallest memory of any legal choice."""
        return self.points[-1].memory

    def fastest_within(self, budget: float) -> Point:
        """Return the fastest of the points within `budget`. Raises `Infeasible`."""
        for point in self.points:
            if point.memory <= budget:
                return point
        raise Infeasible(self.least_memory, budget)


def hull(problem: ChoiceProblem, points: int = 32, budget: float | None = None) -> Hull:
    """Return the hull, widest segments first, until it is exact or has `points` points.

    With `budget`, only the segment that holds it is refined, which gives the best Lagrangian bound for it. Raises
    `TooWide`, and `Infeasible` where no choice is legal.
    """
    sweep = _Sweep(problem, find_structure(problem))
    fastest, smallest = sweep.fastest(), sweep.smallest()
    found = [fastest]
    if smallest.memory < fastest.memory:
        found.append(smallest)
        if smallest.time > fastest.time:
            steep = STEEP * (smallest.time - fastest.time) / (fastest.memory - smallest.memory)
            found.append(sweep.at(steep))
        found = _efficient(found)
    waiting = [_waiting(pair) for pair in pairwise(found)]
    heapq.heapify(waiting)
    while waiting and len(found) < points:
        _, _, left, right = heapq.heappop(waiting)
        if budget is not None and not right.memory <= budget <= left.memory:
            continue
        price = (right.time - left.time) / (left.memory - right.memory)
        middle = sweep.at(price)
        below = left.time + price * left.memory - (middle.time + price * middle.memory)
        if below <= 1e-9 * (abs(left.time) + price * abs(left.memory)):
            continue
        found.append(middle)
        for pair in ((left, middle), (middle, right)):
            if pair[0].memory > pair[1].memory and pair[0].time < pair[1].time:
                heapq.heappush(waiting, _waiting(pair))
    return Hull(tuple(_efficient(found)), tuple(sorted(set(sweep.lines))))


def bound_at(found: Hull, budget: float) -> float:
    """Return a lower bound of the value of every choice within `budget`; +inf where there is none."""
    return line_at(found, budget)[0]


def line_at(found: Hull, budget: float) -> tuple[float, float]:
    """Return the bound for `budget`, and the price that proves it."""
    if budget < found.least_memory:
        return inf, inf
    bounds = [
        (line.value - line.price * budget - ROUNDING * (abs(line.value) + line.price * abs(budget)), line.price)
        for line in found.lines
    ]
    return max(bounds)


class _Sweep:
    """One problem, solved at many prices. `lines` grows with each."""

    def __init__(self, problem: ChoiceProblem, structure: Structure) -> None:
        self.problem = problem
        self.structure = structure
        self.edges = tables_of(problem)[1]
        self.lines: list[SupportLine] = []

    def at(self, price: float) -> Point:
        """Return the best point at `price`. Raises `Infeasible` where nothing is legal."""
        point = self._point(priced(self.problem, price), self.edges)
        if point.time == inf:
            raise Infeasible(inf)
        self.lines.append(SupportLine(price, point.time + price * point.memory))
        return point

    def fastest(self) -> Point:
        """Return the best point where memory costs nothing."""
        return self.at(0.0)

    def smallest(self) -> Point:
        """Return a point of least memory, by a problem in which every legal strategy costs its memory."""
        closed: dict[int, Table] = {}
        for table in self.edges:
            if id(table) not in closed:
                closed[id(table)] = np.where(np.isfinite(table), 0.0, inf)
        nodes = []
        shared: dict[tuple[int, int], Table] = {}
        for node in self.problem.nodes:
            key = (id(node.cost), id(node.memory))
            if key not in shared:
                memory = 0.0 if node.memory is None else node.memory
                shared[key] = np.where(np.isfinite(node.cost), memory, inf)
            nodes.append(shared[key])
        return self._point(nodes, [closed[id(table)] for table in self.edges])

    def _point(self, nodes: Sequence[Table], edges: Sequence[Table]) -> Point:
        choices = best_choices(self.structure, self.problem, nodes, edges)
        return Point(evaluate(self.problem, choices), memory_of(self.problem, choices), choices)


def _waiting(pair: tuple[Point, Point]) -> tuple[float, float, Point, Point]:
    """Return the key and the ends of a segment for the heap: the largest area first, then the fastest."""
    left, right = pair
    return -(right.time - left.time) * (left.memory - right.memory), left.time, left, right


def _efficient(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto frontier of time and memory, from the fastest point on."""
    answer: list[Point] = []
    for point in sorted(points):
        if not answer or point.memory < answer[-1].memory:
            answer.append(point)
    return answer
