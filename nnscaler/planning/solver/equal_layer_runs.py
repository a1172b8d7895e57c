"""Find runs of equal consecutive layers in a problem, from the tables of their nodes and edges.

Layers may repeat with a period: alternating kinds of layers make segments of two. A run's segments have equal nodes,
equal edges to the segment before, and equal edges to the same nodes elsewhere, which are its hubs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from nnscaler.planning.solver.problem import ChoiceProblem, Table

PERIODS = range(1, 9)


@dataclass(frozen=True, slots=True)
class EqualSegments:
    """Equal segments of a problem.

    segments   node indices of each, in the order of composition; the first stays as it is, all others are folded
    cut        positions in a segment of the nodes that touch the next one
    hubs       the nodes that all segments touch
    """

    segments: tuple[tuple[int, ...], ...]
    cut: tuple[int, ...]
    hubs: tuple[int, ...]

    def cut_of(self, segment: int) -> tuple[int, ...]:
        """Return the nodes of a segment that touch the next one."""
        return tuple(self.segments[segment][position] for position in self.cut)


def find_runs(problem: ChoiceProblem, apart: Sequence[int] = ()) -> tuple[EqualSegments, ...]:
    """Return the runs of at least three equal segments, first to last. Layers with a node of `apart` are in none."""
    layers = _layers(problem)
    if len(layers) < 3:
        return ()
    own, link, touched = _signatures(problem, layers)
    for node in apart:
        if 0 <= problem.nodes[node].group < len(layers):
            own[problem.nodes[node].group] = ("apart", node)
    near = _neighbours(problem)
    runs: list[EqualSegments] = []
    start = 0
    while start < len(layers) - 2:
        period, count = _longest(own, link, start)
        run = None
        while count >= 3 and run is None:
            run = _run(problem, near, layers, touched, start, period, count)
            count -= 1
        if run is None:
            start += 1
        else:
            runs.append(run)
            start += (count + 1) * period
    return tuple(runs)


def _layers(problem: ChoiceProblem) -> list[list[int]]:
    """Return the node indices of each layer; none where the numbers of layers have holes."""
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(problem.nodes):
        if node.group >= 0:
            groups.setdefault(node.group, []).append(index)
    if sorted(groups) != list(range(len(groups))):
        return []
    return [groups[number] for number in range(len(groups))]


def _table_names(problem: ChoiceProblem) -> dict[int, int]:
    """Return, by id of an array, a number that equal arrays share."""
    by_content: dict[Hashable, int] = {}
    names: dict[int, int] = {}

    def name(table: Table) -> None:
        if id(table) not in names:
            names[id(table)] = by_content.setdefault((table.shape, table.tobytes()), len(by_content))

    for node in problem.nodes:
        name(node.cost)
        if node.memory is not None:
            name(node.memory)
    for edge in problem.edges:
        name(edge.cost)
    return names


def _signatures(
    problem: ChoiceProblem, layers: list[list[int]]
) -> tuple[list[Hashable], list[Hashable], list[frozenset[int]]]:
    """Return, for each layer, its own tables, its edges to the layer before, and the nodes elsewhere that it
    touches."""
    names = _table_names(problem)
    position = {node: place for layer in layers for place, node in enumerate(layer)}
    own: list[list[tuple[int, ...]]] = [[] for _ in layers]
    link: list[list[tuple[int, ...]]] = [[] for _ in layers]
    touched: list[set[int]] = [set() for _ in layers]
    for edge in problem.edges:
        name = names[id(edge.cost)]
        first, second = problem.nodes[edge.first].group, problem.nodes[edge.second].group
        if min(first, second) >= 0 and abs(first - second) <= 1:
            ends = (position[edge.first], position[edge.second], name, first - second)
            (own[first] if first == second else link[max(first, second)]).append(ends)
            continue
        for group, inside, outside, side in (
            (first, edge.first, edge.second, 2),
            (second, edge.second, edge.first, 3),
        ):
            if group >= 0:
                own[group].append((position[inside], outside, name, side))
                touched[group].add(outside)
    nodes = [
        tuple(
            (names[id(node.cost)], -1 if node.memory is None else names[id(node.memory)])
            for node in (problem.nodes[index] for index in layer)
        )
        for layer in layers
    ]
    whole: list[Hashable] = [(part, tuple(sorted(edges))) for part, edges in zip(nodes, own, strict=True)]
    return whole, [tuple(sorted(edges)) for edges in link], [frozenset(nodes) for nodes in touched]


def _longest(own: Sequence[Hashable], link: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Return the period and the number of the equal segments from layer `start` that fold the most layers."""
    best = (1, 1)
    for period in PERIODS:
        layer = start
        while layer + period < len(own) and own[layer] == own[layer + period]:
            if layer > start and link[layer] != link[layer + period]:
                break
            layer += 1
        count = 1 + (layer - start) // period
        if period * (count - 2) > best[0] * (best[1] - 2):
            best = (period, count)
    return best


def _neighbours(problem: ChoiceProblem) -> list[set[int]]:
    near: list[set[int]] = [set() for _ in problem.nodes]
    for edge in problem.edges:
        near[edge.first].add(edge.second)
        near[edge.second].add(edge.first)
    return near


def _run(
    problem: ChoiceProblem,
    near: Sequence[set[int]],
    layers: Sequence[Sequence[int]],
    touched: Sequence[frozenset[int]],
    start: int,
    period: int,
    count: int,
) -> EqualSegments | None:
    """Return the run, composed in the direction with the smaller cut; None where its end touches others by more than
    that."""
    segments = tuple(
        tuple(node for layer in layers[first : first + period] for node in layer)
        for first in range(start, start + count * period, period)
    )
    hubs = frozenset().union(*touched[start : start + period])
    inside = {node for segment in segments for node in segment}
    if hubs & inside:
        return None
    sizes = problem.sizes
    candidates: list[tuple[int, int, EqualSegments]] = []
    for ordered in (segments, segments[::-1]):
        after = set(ordered[2])
        cut = tuple(place for place, node in enumerate(ordered[1]) if near[node] & after)
        allowed = set(ordered[-1]) | set(ordered[-2]) | hubs
        ends = {place for place, node in enumerate(ordered[-1]) if near[node] - allowed}
        if ends <= set(cut):
            width = prod(sizes[ordered[1][place]] for place in cut)
            candidates.append((width, len(candidates), EqualSegments(ordered, cut, tuple(sorted(hubs)))))
    return min(candidates)[2] if candidates else None
