"""The order in which variables are eliminated: always the one whose table is the smallest.

This is the min-weight heuristic (Kjaerulff 1990) for elimination orders, of which the best is NP-hard to find.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

from nnscaler.planning.solver.problem import TooWide

CAP = 2**26  # entries of one table
KEPT = 2**27  # entries of all messages together, 1 GiB
STEP = 20_000  # what one elimination costs apart from its entries, in entries


@dataclass(frozen=True, slots=True)
class Order:
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
    cap: int | None = None,
) -> Order:
    """Return an order that eliminates `variables` but those to `keep`.

    `scopes` are the variables of each factor, and `sizes[v]` is the number of values of variable v. Raises `TooWide`
    where a table would have more than `cap` (or else `CAP`) entries, or all messages more than `KEPT`.
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
    limit = log2(CAP if cap is None else cap) + 1e-6
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
    return Order(tuple(order), tuple(keep), work)


def _connect(near: dict[int, set[int]], table: dict[int, float], weights: dict[int, float], gone: int) -> None:
    """Connect the neighbours of a variable that goes, and bring their tables' weights up to date."""
    around = sorted(near[gone])
    for other in around:
        near[other].discard(gone)
        added = [third for third in around if third != other and third not in near[other]]
        near[other].update(added)
        table[other] += sum(weights[third] for third in added) - weights[gone]
