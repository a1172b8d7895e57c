"""The tables of a chain without strategies that another one of their node beats in every respect."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.sharding.tables import Column, Columns, Tables
from nnscaler.planning.solver.problem import Edge
from nnscaler.planning.solver.reduce import Criteria, merge_edges, survivors

T = TypeVar("T")
Kept = tuple[NDArray[np.intp], ...]  # of every node, the strategies that are left


def lean(tables: Tables, fixed: Collection[int]) -> tuple[Tables, Kept]:
    """The smaller tables. What goes is no better in seconds, with what its neighbours are converted to and from,
    whether its layer is run again or not, and in no kind of bytes; so it is in no plan that is needed, at any price of
    memory. Those `fixed` keep all their strategies: nodes whose edges are not all here.

    Raises `Infeasible` where a node has no strategy that all its neighbours can go with.
    """
    made: dict[int, Criteria] = {}
    for columns in tables.columns:
        if id(columns) not in made:
            once = columns.forward + columns.backward
            costs = np.stack([once, once + columns.forward], axis=1)
            needs = [
                columns.resting,
                columns.kept,
                columns.handed,
                *(columns.summed[a] for a in sorted(columns.summed)),
            ]
            made[id(columns)] = Criteria(costs, np.stack(needs, axis=1))
    pairs = merge_edges(Edge(first, second, table) for first, second, table in tables.edges)
    kept = survivors([made[id(columns)] for columns in tables.columns], pairs, fixed)
    return _cut(tables, kept), kept


def _cut(tables: Tables, kept: Kept) -> Tables:
    """What was shared stays so where what is left is the same."""
    of_nodes: dict[tuple[int, bytes], Columns] = {}
    columns = []
    for own, left in zip(tables.columns, kept, strict=True):
        key = (id(own), left.tobytes())
        if key not in of_nodes:
            of_nodes[key] = _columns(own, left)
        columns.append(of_nodes[key])
    of_edges: dict[tuple[int, bytes, bytes], Column] = {}
    edges = []
    for first, second, table in tables.edges:
        pair = (id(table), kept[first].tobytes(), kept[second].tobytes())
        if pair not in of_edges:
            of_edges[pair] = table[np.ix_(kept[first], kept[second])]
        edges.append((first, second, of_edges[pair]))
    operations = len(tables.strategies)
    strategies = {name: _listed(tables.strategies[name], kept[i]) for i, name in enumerate(tables.names[:operations])}
    named = enumerate(tables.names[operations:], operations)
    layouts = {name: _listed(tables.layouts[name], kept[i]) for i, name in named}
    return Tables(tables.names, tables.groups, tuple(columns), tuple(edges), strategies, layouts)


def _columns(own: Columns, left: NDArray[np.intp]) -> Columns:
    summed = {axis: column[left] for axis, column in own.summed.items()}
    return Columns(own.forward[left], own.backward[left], own.resting[left], own.kept[left], own.handed[left], summed)


def _listed(values: Sequence[T], left: NDArray[np.intp]) -> tuple[T, ...]:
    return tuple(values[i] for i in left)
