"""Prune strategies from cost tables that are dominated in time and in every kind of memory (dead-end elimination, see
`solver.drop_dominated_strategies`), in a whole pass and in the ramp of every schedule that is planned."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.parallel_configurations import uneven_ramps
from nnscaler.planning.sharding.cost_tables import Column, Columns, Tables
from nnscaler.planning.solver.drop_dominated_strategies import Criteria, merge_edges, survivors
from nnscaler.planning.solver.problem import Edge
from nnscaler.scheduling.schedule import Ramp

T = TypeVar("T")
Numbers = NDArray[np.float64]
WHOLE_PASS: Ramp = (1.0, 1.0, 1.0)
Kept = tuple[NDArray[np.intp], ...]  # of every node, the strategies that are left


def lean(tables: Tables, fixed: Collection[int]) -> tuple[Tables, Kept]:
    """Return smaller tables without dominated strategies, and the strategies that every node keeps.

    A strategy goes where another one of its node is no slower, including the conversions to and from its neighbours,
    whether its layer is recomputed or not, in a whole pass and in the ramp of every schedule that is planned, and needs
    no more of any kind of bytes. So no plan needs it, at any price of memory. The nodes in `fixed` keep all their
    strategies: not all of their edges are in these tables.

    Raises `Infeasible` where a node has no strategy that all its neighbours can go with.
    """
    forms = (WHOLE_PASS, *uneven_ramps())
    often = np.array([of_conversions(form) for form in (*forms, *forms)])
    made: dict[int, Criteria] = {}
    for columns in tables.columns:
        if id(columns) not in made:
            # [strategies, 2 * forms]: seconds with the activations kept, and with the layer recomputed
            whole = [seconds_of(columns, form) for form in forms]
            again = [once + form[1] * columns.again for once, form in zip(whole, forms, strict=True)]
            costs = np.stack([*whole, *again], axis=1)
            # [strategies, kinds]: seconds of a step, bytes at rest, kept, handed on, arriving, whole, summed over axes
            needs = [
                columns.once,
                columns.resting,
                columns.kept,
                columns.handed,
                columns.arriving,
                columns.gathered,
                *(columns.summed[a] for a in sorted(columns.summed)),
            ]
            made[id(columns)] = Criteria(costs, np.stack(needs, axis=1), often)
    pairs = merge_edges(Edge(first, second, table) for first, second, table in tables.edges)
    kept = survivors([made[id(columns)] for columns in tables.columns], pairs, fixed)
    return _cut(tables, kept), kept


def _cut(tables: Tables, kept: Kept) -> Tables:
    """Restrict the tables to the kept strategies.

    Arrays that nodes shared stay shared where what is left of them is the same.
    """
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
    return Columns(
        own.forward[left],
        own.backward[left],
        own.once[left],
        own.resting[left],
        own.kept[left],
        own.handed[left],
        own.arriving[left],
        {axis: column[left] for axis, column in own.summed.items()},
        own.weights[left],
        own.again[left],
        own.gathered[left],
        own.cheap[left],
    )


def _listed(values: Sequence[T], left: NDArray[np.intp]) -> tuple[T, ...]:
    return tuple(values[i] for i in left)


def seconds_of(columns: Columns, form: Ramp) -> Column:
    """Return the seconds of each of a node's choices where F, I and W count so often: [choices]."""
    f, i, w = form
    return f * columns.forward + i * (columns.backward - columns.weights) + w * columns.weights


def of_conversions(form: Ramp) -> float:
    """Return how often conversions count there: half of each is F's, and half I's."""
    return (form[0] + form[1]) / 2


def often_counted(table: Numbers, often: float | Numbers) -> Numbers:
    """Return the seconds of conversions that count so often; what is impossible stays so."""
    return np.where(np.isfinite(table), np.where(np.isfinite(table), table, 0.0) * often, np.inf)
