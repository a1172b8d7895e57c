"""Fold equal consecutive layers exactly: the optimum of the flat problem at the price of one layer.

The interior of a segment is eliminated once, which leaves a table over the cut before, the cut after and the hubs; the
run is a (min, +) power of that table (see below). The rest is eliminated as usual (`variable_elimination`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from nnscaler.planning.solver.equal_layer_runs import EqualSegments, find_runs
from nnscaler.planning.solver.problem import ChoiceProblem, Solution, Table, TooWide
from nnscaler.planning.solver.variable_elimination import (
    CAP,
    STEP,
    Elimination,
    EliminationOrder,
    Factor,
    exact_solution,
    find_order,
    run_elimination,
    substitute,
)

# Powers of a table in the (min, +) semiring by repeated squaring, and the states along the best path.
# The n-th power of the table of one segment is the table of n segments in a row: the entry of two states is the
# cost of the shortest path between them. A table has axes [hub, before, after]: what a segment costs between two
# states of its cut, for each choice of the hubs.


@dataclass(frozen=True, slots=True, eq=False)
class Power:
    """The `count`-th power of a table.

    doubled    `doubled[j]` is the 2**j-th power: [hub, before, after]
    prefixes   products of the powers that make up `count`, the smallest first
    count      the exponent
    """

    doubled: tuple[Table, ...]
    prefixes: tuple[Table, ...]
    count: int

    @property
    def table(self) -> Table:
        """The power itself."""
        return self.prefixes[-1]


def multiply(first: Table, second: Table) -> Table:
    """Return the (min, +) product: the best over the state in the middle."""
    # [states]: whether any path goes through this state in the middle
    useful = np.isfinite(first).any(axis=(0, 1)) & np.isfinite(second).any(axis=(0, 2))
    answer = np.full((first.shape[0], first.shape[1], second.shape[2]), np.inf)
    for state in np.flatnonzero(useful):
        np.minimum(answer, first[:, :, state, None] + second[:, None, state, :], out=answer)
    return answer


def raise_to(table: Table, count: int) -> Power:
    """Return the `count`-th power of `table`, count at least one."""
    doubled = [table]
    while 2 ** len(doubled) <= count:
        doubled.append(multiply(doubled[-1], doubled[-1]))
    parts = [doubled[bit] for bit in _bits(count)]
    prefixes = [parts[0]]
    for part in parts[1:]:
        prefixes.append(multiply(prefixes[-1], part))
    return Power(tuple(doubled), tuple(prefixes), count)


def states(power: Power, hub: int, first: int, last: int) -> list[int]:
    """Return the `count` + 1 states of a best path from `first` to `last`."""
    bits = _bits(power.count)
    ends = [last]
    for index in range(len(bits) - 1, 0, -1):
        ends.append(_middle(power.prefixes[index - 1], power.doubled[bits[index]], hub, first, ends[-1]))
    path = [first]
    for bit, end in zip(bits, reversed(ends), strict=True):
        path += _inside(power, bit, hub, path[-1], end)
    return path


def _inside(power: Power, bit: int, hub: int, first: int, last: int) -> list[int]:
    """Return the states after `first` up to `last` of a path of 2**bit segments."""
    if bit == 0:
        return [last]
    half = power.doubled[bit - 1]
    middle = _middle(half, half, hub, first, last)
    return _inside(power, bit - 1, hub, first, middle) + _inside(power, bit - 1, hub, middle, last)


def _middle(before: Table, after: Table, hub: int, first: int, last: int) -> int:
    return int((before[hub, first] + after[hub, :, last]).argmin())


def _bits(count: int) -> list[int]:
    return [bit for bit in range(count.bit_length()) if count >> bit & 1]


Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fold:
    """A run and how it is folded.

    run     the equal segments
    order   eliminates one segment
    edges   indices of the edges that the segment's table counts
    work    table entries
    """

    run: EqualSegments
    order: EliminationOrder
    edges: tuple[int, ...]
    work: float

    @property
    def scope(self) -> Scope:
        """The variables of the table that stands for the run."""
        return (*self.run.hubs, *self.run.cut_of(0), *self.run.cut_of(-1))


@dataclass(frozen=True, slots=True)
class Structure:
    """How a problem is solved, which depends on its shape and on which tables are equal, but not on their values.

    folds   the runs that are folded
    nodes   that are eliminated apart from runs
    edges   indices of the edges that no fold counts
    order   eliminates what is left
    """

    folds: tuple[_Fold, ...]
    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    order: EliminationOrder

    @property
    def work(self) -> float:
        """Table entries, with what steps cost apart from these."""
        return self.order.work + sum(fold.work for fold in self.folds)


def find_structure(problem: ChoiceProblem, keep: Sequence[int] = ()) -> Structure:
    """Fold the runs that are worth it, and find the order for the rest.

    The nodes to `keep` are neither folded nor eliminated.

    Raises `TooWide`.
    """
    touching = _touching(problem)
    worth = (_worth(problem, touching, run) for run in find_runs(problem, keep))
    folds = tuple(fold for fold in worth if fold is not None)
    inside: set[int] = set()
    counted: set[int] = set()
    gone: set[int] = set()
    for fold in folds:
        inside.update(node for segment in fold.run.segments[1:] for node in segment)
        exposed = set(fold.run.cut_of(-1))
        gone.update(node for segment in fold.run.segments[1:] for node in segment if node not in exposed)
        counted.update(_counted(problem, touching, fold.run))
    edges = tuple(index for index in range(len(problem.edges)) if index not in counted)
    nodes = tuple(index for index in range(len(problem.nodes)) if index not in inside)
    scopes: list[Scope] = [(problem.edges[index].first, problem.edges[index].second) for index in edges]
    scopes += [fold.scope for fold in folds]
    variables = [index for index in range(len(problem.nodes)) if index not in gone]
    return Structure(folds, nodes, edges, find_order(scopes, variables, problem.sizes, keep))


def best_choices(
    structure: Structure, problem: ChoiceProblem, nodes: Sequence[Table], edges: Sequence[Table]
) -> tuple[int, ...]:
    """Return optimal choices of the problem with these tables, which must be equal where those of `problem` are."""
    assert not structure.order.keep
    elimination, powers = _eliminate(structure, problem, nodes, edges)
    choices: dict[int, int] = {}
    substitute(elimination, choices)
    for fold, (segment, power) in zip(structure.folds, powers, strict=True):
        _unfold(fold, segment, power, problem.sizes, choices)
    return tuple(choices[index] for index in range(len(problem.nodes)))


def solve_folded(problem: ChoiceProblem, structure: Structure | None = None) -> Solution:
    """Return the optimum; `structure`: where it is known.

    Raises `TooWide`, and `Infeasible` where no choice is legal.
    """
    structure = structure or find_structure(problem)
    choices = best_choices(structure, problem, *tables_of(problem))
    return exact_solution(problem, choices, "folding" if structure.folds else "elimination")


def min_marginal(problem: ChoiceProblem, node: int, price: float = 0.0) -> Table:
    """Return the best value with `node` fixed to each of its strategies, [k], the other layers folded.

    Raises `TooWide`.

    With a `price` per unit of memory, that of cost and price times memory: take the `multiplier` of a solution.
    """
    structure = find_structure(problem, keep=(node,))
    _, edges = tables_of(problem)
    return _eliminate(structure, problem, priced(problem, price), edges)[0].table()


def tables_of(problem: ChoiceProblem) -> tuple[list[Table], list[Table]]:
    """Return the costs of the nodes and of the edges."""
    return [node.cost for node in problem.nodes], [edge.cost for edge in problem.edges]


def priced(problem: ChoiceProblem, price: float) -> list[Table]:
    """Return the costs of the nodes with `price` per unit of memory."""
    found: dict[tuple[int, int], Table] = {}
    answer = []
    for node in problem.nodes:
        if node.memory is None or price == 0.0:
            answer.append(node.cost)
            continue
        key = (id(node.cost), id(node.memory))
        if key not in found:
            found[key] = node.cost + price * node.memory
        answer.append(found[key])
    return answer


def _eliminate(
    structure: Structure, problem: ChoiceProblem, nodes: Sequence[Table], edges: Sequence[Table]
) -> tuple[Elimination, list[tuple[Elimination, Power]]]:
    sizes = problem.sizes
    powers = [_power(fold, problem, nodes, edges) for fold in structure.folds]
    factors = [Factor((index,), nodes[index]) for index in structure.nodes]
    factors += [
        Factor((problem.edges[index].first, problem.edges[index].second), edges[index]) for index in structure.edges
    ]
    for fold, (_, power) in zip(structure.folds, powers, strict=True):
        shape = [sizes[variable] for variable in fold.scope]
        factors.append(Factor(fold.scope, power.table.reshape(shape)))
    return run_elimination(factors, structure.order, sizes), powers


def _power(
    fold: _Fold, problem: ChoiceProblem, nodes: Sequence[Table], edges: Sequence[Table]
) -> tuple[Elimination, Power]:
    """Return the elimination of one segment, and its power over all segments but the first."""
    sizes = problem.sizes
    factors = [Factor((index,), nodes[index]) for index in fold.run.segments[1]]
    factors += [Factor((problem.edges[index].first, problem.edges[index].second), edges[index]) for index in fold.edges]
    segment = run_elimination(factors, fold.order, sizes)
    hub, width = _extent(fold.run, sizes)
    table = np.ascontiguousarray(segment.table()).reshape(hub, width, width)
    return segment, raise_to(table, len(fold.run.segments) - 1)


def _unfold(fold: _Fold, segment: Elimination, power: Power, sizes: Sequence[int], choices: dict[int, int]) -> None:
    """Complete `choices` by the best of all nodes of the run."""
    run = fold.run
    cut_sizes = [sizes[node] for node in run.cut_of(0)]
    hubs = {node: choices[node] for node in run.hubs}
    hub = _joint(list(hubs.values()), [sizes[node] for node in run.hubs])
    first, last = (_joint([choices[node] for node in run.cut_of(end)], cut_sizes) for end in (0, -1))
    path = states(power, hub, first, last)
    found: dict[tuple[int, int], Mapping[int, int]] = {}
    for number in range(1, len(run.segments)):
        ends = (path[number - 1], path[number])
        if ends not in found:
            inside = dict(hubs)
            for index, state in enumerate(ends):
                inside.update(zip(run.cut_of(index), _apart(state, cut_sizes), strict=True))
            substitute(segment, inside)
            found[ends] = inside
        for node, model in zip(run.segments[number], run.segments[1], strict=True):
            choices[node] = found[ends][model]


def _joint(choices: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of a joint choice, the last one running fastest."""
    return int(np.ravel_multi_index(tuple(choices), tuple(sizes))) if sizes else 0


def _apart(state: int, sizes: Sequence[int]) -> list[int]:
    return [int(choice) for choice in np.unravel_index(state, tuple(sizes))] if sizes else []


def _touching(problem: ChoiceProblem) -> list[list[int]]:
    """Return the edges (indices) at each node."""
    touching: list[list[int]] = [[] for _ in problem.nodes]
    for index, edge in enumerate(problem.edges):
        touching[edge.first].append(index)
        touching[edge.second].append(index)
    return touching


def _extent(run: EqualSegments, sizes: Sequence[int]) -> tuple[int, int]:
    """Return how many joint choices the hubs and the cut have."""
    return prod(sizes[node] for node in run.hubs), prod(sizes[node] for node in run.cut_of(0))


def _segment_edges(
    problem: ChoiceProblem, touching: Sequence[Sequence[int]], run: EqualSegments, number: int
) -> list[int]:
    """Return the edges of a segment inside of it, to the segment before, and to the hubs."""
    allowed = set(run.segments[number]) | set(run.segments[number - 1]) | set(run.hubs)
    found = {index for node in run.segments[number] for index in touching[node]}
    return sorted(i for i in found if problem.edges[i].first in allowed and problem.edges[i].second in allowed)


def _counted(problem: ChoiceProblem, touching: Sequence[Sequence[int]], run: EqualSegments) -> list[int]:
    """Return the edges that the table of the run counts."""
    return [i for number in range(1, len(run.segments)) for i in _segment_edges(problem, touching, run, number)]


def _worth(problem: ChoiceProblem, touching: Sequence[Sequence[int]], run: EqualSegments) -> _Fold | None:
    """Return how to fold the run, or None where plain elimination of all segments costs less, or the tables are too
    wide."""
    sizes = problem.sizes
    hub, width = _extent(run, sizes)
    if hub * width * width > CAP:
        return None
    edges = _segment_edges(problem, touching, run, 1)
    scopes = [(problem.edges[index].first, problem.edges[index].second) for index in edges]
    ends = (*run.hubs, *run.cut_of(0), *run.cut_of(1))
    inside = [node for node in run.segments[1] if node not in run.cut_of(1)]
    count = len(run.segments) - 1
    try:
        order = find_order(scopes, inside, sizes, keep=ends)
    except TooWide:
        return None
    products = count.bit_length() + count.bit_count() - 2
    folded = order.work + products * (2.0 * hub * width**3 + STEP)
    try:
        variables = sorted(set(run.segments[1]) | set(ends))
        flat = find_order(scopes, variables, sizes).work * count
    except TooWide:
        flat = np.inf
    return _Fold(run, order, tuple(edges), folded) if folded < flat else None
