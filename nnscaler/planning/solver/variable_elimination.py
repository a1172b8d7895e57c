"""Eliminate variables exactly from sums of tables.

Bucket elimination (Dechter 1999): a variable's tables are added and minimised over it; the result is a message to the
bucket of the next of its neighbours. Choices are read off in reverse order from the tables themselves, so that no table
of arguments is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from math import inf, log2, prod
from typing import Any

import numpy as np

from nnscaler.planning.solver.problem import ChoiceProblem, Infeasible, Solution, Table, TooWide, evaluate

# The order in which variables are eliminated: always the one whose table is the smallest.
# This is the min-weight heuristic (Kjaerulff 1990) for elimination orders, of which the best is NP-hard to find.

CAP = 2**26  # entries of one table
KEPT = 2**27  # entries of all messages together, 1 GiB
STEP = 20_000  # what one elimination costs apart from its entries, in entries


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """An elimination order.

    variables   to eliminate, first to last
    keep        variables that stay
    work        table entries that the elimination visits, with what steps cost apart from these
    """

    variables: tuple[int, ...]
    keep: tuple[int, ...]
    work: float


def find_order(
    scopes: Iterable[Sequence[int]],
    variables: Sequence[int],
    sizes: Sequence[int],
    keep: Sequence[int] = (),
) -> EliminationOrder:
    """Return an order that eliminates `variables` but those to `keep`.

    `scopes` are the variables of each factor, and `sizes[v]` is the number of values of variable v. Raises `TooWide`
    where a table would have more than `CAP` entries, or all messages more than `KEPT`.
    """
    weights = {variable: log2(sizes[variable]) for variable in (*variables, *keep)}
    near: dict[int, set[int]] = {variable: set() for variable in weights}
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    table = {}
    for variable, others in near.items():
        others.discard(variable)
        table[variable] = weights[variable] + sum(weights[other] for other in sorted(others))
    kept = set(keep)
    heap = [(table[variable], variable) for variable in variables if variable not in kept]
    heapq.heapify(heap)
    order: list[int] = []
    done: set[int] = set()
    work = messages = 0.0
    limit = log2(CAP) + 1e-6
    while heap:
        weight, variable = heapq.heappop(heap)
        if variable in done or weight != table[variable]:
            continue
        if weight > limit:
            raise TooWide(weight)
        done.add(variable)
        order.append(variable)
        work += 2.0**weight + STEP
        messages += 2.0 ** (weight - weights[variable])
        if messages > KEPT:
            raise TooWide(log2(messages))
        _connect(near, table, weights, variable)
        for other in sorted(near.pop(variable)):
            if other not in kept:
                heapq.heappush(heap, (table[other], other))
    return EliminationOrder(tuple(order), tuple(keep), work)


def _connect(near: dict[int, set[int]], table: dict[int, float], weights: dict[int, float], gone: int) -> None:
    """Connect the neighbours of a variable that goes, and bring their tables' weights up to date."""
    around = sorted(near[gone])
    for other in around:
        near[other].discard(gone)
        added = [third for third in around if third != other and third not in near[other]]
        near[other].update(added)
        table[other] += sum(weights[third] for third in added) - weights[gone]


BLOCK = 2**18  # entries of a table that are added at once: they stay in the processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table of costs over some variables.

    scope   the variables, one per axis
    table   [sizes of the variables of `scope`]
    """

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One step of an elimination.

    variable   that is eliminated; it is the first axis of every factor
    factors    all tables that name it
    """

    variable: int
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """Messages of an elimination, and the tables from which choices are read off.

    buckets   in the order of elimination
    rest      messages and tables over kept variables only
    keep      the variables that were kept
    sizes     by variable, its number of values
    """

    buckets: tuple[Bucket, ...]
    rest: tuple[Factor, ...]
    keep: tuple[int, ...]
    sizes: tuple[int, ...]

    def table(self) -> Table:
        """Return the best value for each choice of the kept variables, one axis each; a table without axes for none."""
        shape = tuple(self.sizes[variable] for variable in self.keep)
        total = np.zeros(shape)
        for factor in self.rest:
            total = total + _align(factor, self.keep)
        return total


def run_elimination(factors: Sequence[Factor], order: EliminationOrder, sizes: Sequence[int]) -> Elimination:
    """Eliminate the variables of `order` from `factors`, which name no other variables than those and the kept ones.

    Variables with one value name no axis: a table of hundreds of them has few entries, and more axes than numpy has.
    """
    single = {variable for variable in order.variables if sizes[variable] == 1}
    place = {variable: index for index, variable in enumerate((*order.variables, *order.keep))}
    waiting: list[list[Factor]] = [[] for _ in order.variables]
    rest: list[Factor] = []
    last = len(order.variables)

    def put(factor: Factor) -> None:
        first = place[factor.scope[0]] if factor.scope else last
        (waiting[first] if first < last else rest).append(factor)

    for factor in factors:
        put(_sort_axes(_without(factor, single), place))
    buckets: list[Bucket] = []
    for index, variable in enumerate(order.variables):
        inside = tuple(waiting[index])
        named = {other for factor in inside for other in factor.scope} - {variable}
        scope = tuple(sorted(named, key=place.__getitem__))
        buckets.append(Bucket(variable, inside))
        if inside:
            put(Factor(scope, _minimise(inside, (variable, *scope), sizes)))
    return Elimination(tuple(buckets), tuple(rest), order.keep, tuple(sizes))


def substitute(elimination: Elimination, choices: dict[int, int]) -> None:
    """Complete `choices`, which has those of the kept variables, by the best of every eliminated variable."""
    for bucket in reversed(elimination.buckets):
        total = np.zeros(elimination.sizes[bucket.variable])
        for factor in bucket.factors:
            place: tuple[Any, ...] = (slice(None), *(choices[other] for other in factor.scope[1:]))
            total = total + factor.table[place]
        choices[bucket.variable] = int(total.argmin())


def exact_solution(problem: ChoiceProblem, choices: tuple[int, ...], how: str) -> Solution:
    """Return optimal `choices` as a solution. Raises `Infeasible` where even they are forbidden."""
    value = evaluate(problem, choices)
    if value == inf:
        raise Infeasible(inf)
    return Solution(choices, value, value, how)


def _without(factor: Factor, single: Set[int]) -> Factor:
    """Return the factor without the axes of these variables, which have one value."""
    if single.isdisjoint(factor.scope):
        return factor
    axes = [axis for axis, variable in enumerate(factor.scope) if variable not in single]
    shape = [factor.table.shape[axis] for axis in axes]
    return Factor(tuple(factor.scope[axis] for axis in axes), factor.table.reshape(shape))


def _sort_axes(factor: Factor, place: dict[int, int]) -> Factor:
    """Return the factor with its axes in the order of elimination, so that tables line up without transposition."""
    positions = [place[variable] for variable in factor.scope]
    if positions == sorted(positions):
        return factor
    axes = sorted(range(len(positions)), key=positions.__getitem__)
    scope = tuple(factor.scope[axis] for axis in axes)
    return Factor(scope, np.ascontiguousarray(factor.table.transpose(axes)))


def _align(factor: Factor, scope: Sequence[int]) -> Table:
    """Return the factor's table with one axis per variable of `scope`, of size one where the factor does not name it.

    Both name variables in the order of elimination.
    """
    named = dict(zip(factor.scope, factor.table.shape, strict=True))
    return factor.table.reshape([named.get(variable, 1) for variable in scope])


def _minimise(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Sequence[int]) -> Table:
    """Add `factors` over `scope`, and minimise over its first variable. Small tables are added first."""
    shape = tuple(sizes[variable] for variable in scope)
    tables = sorted((_align(factor, scope) for factor in factors), key=np.size)
    entries = prod(shape)
    if entries <= BLOCK or len(shape) == 1:
        answer: Table = reduce(np.add, tables).min(axis=0)
        return answer
    # large tables are added and minimised in blocks along the second axis
    answer = np.empty(shape[1:])
    step = max(1, BLOCK * shape[1] // entries)
    for start in range(0, shape[1], step):
        part = [table[:, start : start + step] if table.shape[1] > 1 else table for table in tables]
        np.min(reduce(np.add, part), axis=0, out=answer[start : start + step])
    return answer
