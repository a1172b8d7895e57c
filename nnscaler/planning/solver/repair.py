"""Better choices within a budget of memory, from choices at hand.

Equal layers change together at one price of memory, so that hull points lie far apart. Between two points lie their
crossings: the nodes up to some place take the choices of one, the nodes behind it those of the other. For equal layers
this is "the last r of L layers take the cheaper neighbour". What memory is then left goes to single nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.solver.hull import Point
from nnscaler.planning.solver.problem import Problem, Table, evaluate, memory_of

ROUNDS = 8  # of crossings, and of passes over single nodes
LEAST = 1e-9  # relative: smaller gains are rounding


def repair(problem: Problem, start: Point, others: Iterable[Point], budget: float) -> Point:
    """The best point within `budget` that crossings of `start`, which is within, and single changes lead to."""
    best = start
    others = tuple(others)
    for _ in range(ROUNDS):
        before = best.time
        for other in others:
            crossed = best_crossing(problem, best, other, budget)
            if crossed is not None and crossed.time < best.time:
                best = crossed
        best = change_single_nodes(problem, best, budget)
        if best.time >= before - LEAST * abs(before):
            break
    return best


def best_crossing(problem: Problem, first: Point, second: Point, budget: float) -> Point | None:
    """The fastest crossing of two points within `budget`; nodes of no layer all follow one of the two."""
    count = len(problem.nodes)
    index = np.arange(count)
    loose = np.array([node.group < 0 for node in problem.nodes])
    variants = [index]
    if loose.any() and not loose.all():
        variants = [np.where(loose, side, index) for side in (-1, count)]
    found: list[tuple[float, int, int]] = []
    pairs = ((first, second), (second, first))
    for number, (places, (behind, ahead)) in enumerate((v, pair) for v in variants for pair in pairs):
        times, memory = _along(problem, places, behind.choices, ahead.choices)
        times[memory > budget] = np.inf
        cut = int(times.argmin())
        found.append((float(times[cut]), number, cut))
    for _, number, cut in sorted(found):
        behind, ahead = pairs[number % 2]
        takes = variants[number // 2] < cut
        choices = tuple(np.where(takes, ahead.choices, behind.choices).tolist())
        point = Point(evaluate(problem, choices), memory_of(problem, choices), choices)
        if np.isfinite(point.time) and point.memory <= budget:
            return point
    return None


def change_single_nodes(problem: Problem, start: Point, budget: float) -> Point:
    """The point after changes of one node at a time that gain time within `budget`, the best of each node first."""
    near: list[list[tuple[int, Table]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.first].append((edge.second, edge.cost))
        near[edge.second].append((edge.first, edge.cost.T))
    choices = list(start.choices)
    memory = start.memory
    least = LEAST * abs(start.time)
    for _ in range(ROUNDS):
        changed = False
        for index, node in enumerate(problem.nodes):
            cost = node.cost.copy()
            for other, table in near[index]:
                cost += table[:, choices[other]]
            now = choices[index]
            if node.memory is not None:
                cost[memory + node.memory - node.memory[now] > budget] = np.inf
            best = int(cost.argmin())
            if best != now and cost[best] < cost[now] - least:
                memory += 0.0 if node.memory is None else float(node.memory[best] - node.memory[now])
                choices[index] = best
                changed = True
        if not changed:
            break
    point = Point(evaluate(problem, choices), memory_of(problem, choices), tuple(choices))
    return point if point.memory <= budget and point.time < start.time else start


def _along(
    problem: Problem, places: NDArray[np.int_], behind: Sequence[int], ahead: Sequence[int]
) -> tuple[Table, Table]:
    """Time and memory of the crossings at 0, 1, ... n: nodes with a place before the crossing choose `ahead`."""
    count = len(problem.nodes)
    steps, memory, closed = (np.zeros(count + 2) for _ in range(3))

    def add(total: Table, values: Table, first: NDArray[np.int_], last: NDArray[np.int_]) -> None:
        """Adds each value to the crossings `first` to `last`, which may be none."""
        some = first <= last
        np.add.at(total, first[some], values[some])
        np.add.at(total, last[some] + 1, -values[some])

    def count_in(values: Table, first: NDArray[np.int_], last: NDArray[np.int_]) -> None:
        finite = np.isfinite(values)
        add(steps, np.where(finite, values, 0.0), first, last)
        add(closed, (~finite).astype(np.float64), first, last)

    start, end = np.zeros(count, np.int_), np.full(count, count)
    for chosen, first, last in ((behind, start, places), (ahead, places + 1, end)):
        pairs = list(zip(problem.nodes, chosen, strict=True))
        count_in(np.array([node.cost[choice] for node, choice in pairs]), first, np.minimum(last, count))
        used = np.array([0.0 if node.memory is None else node.memory[choice] for node, choice in pairs])
        add(memory, used, first, np.minimum(last, count))
    swap = [places[edge.first] > places[edge.second] for edge in problem.edges]
    ends = [(e.second, e.first) if s else (e.first, e.second) for e, s in zip(problem.edges, swap, strict=True)]
    tables = [edge.cost.T if s else edge.cost for edge, s in zip(problem.edges, swap, strict=True)]
    if not ends:
        ends_array = np.zeros((0, 2), np.int_)
    else:
        ends_array = np.array(ends)
    near, far = places[ends_array[:, 0]], places[ends_array[:, 1]]
    zero, whole = np.zeros_like(near), np.full_like(near, count)
    for one, two, first, last in (
        (behind, behind, zero, near),
        (ahead, behind, near + 1, far),
        (ahead, ahead, far + 1, whole),
    ):
        values = [table[one[a], two[b]] for table, (a, b) in zip(tables, ends, strict=True)]
        count_in(np.array(values, np.float64), first, np.minimum(last, count))
    times = np.cumsum(steps)[: count + 1]
    times[np.cumsum(closed)[: count + 1] > 0.5] = np.inf
    return times, np.cumsum(memory)[: count + 1]
