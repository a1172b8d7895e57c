"""Trade-offs of time and memory of a piece of a chain: the ways to run it between two states of its cuts that are best
at some price of memory, and combinations.

The optima at all prices are the supported points of the Pareto frontier of seconds and bytes. Points between two of
them are reached by making only some of the changes that lead from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nnscaler.planning.planner.bounds.equal_layer_pipeline import Layered
from nnscaler.planning.planner.bounds.lagrangian import Prices
from nnscaler.planning.planner.equal_layer_chain import ChainSegment, Priced
from nnscaler.planning.sharding.build_problem import once_at

CHANGES = 7  # between ways, that are made in all combinations
SAME = 1e-9  # relative: priced seconds that differ by less are those of one way

Ends = tuple[int, int]  # states of the cut before and after


@dataclass(frozen=True, slots=True)
class Way:
    """How a piece is run.

    choices   by node, the number of its strategy
    again     whether the layer is recomputed in backward
    seconds   of one micro-batch, forward and backward, with its share of `last`
    resting   bytes of parameters, gradients and optimizer states
    kept      bytes that each live micro-batch keeps
    once      bytes that are there once, whatever the number of live micro-batches: a layer that runs again
    last      seconds at the end of a step: sums of gradients
    """

    choices: Mapping[int, int]
    again: bool
    seconds: float
    resting: float
    kept: float
    once: float
    last: float


def ways_of(layered: Layered, priced: Priced, hubs: Mapping[int, int], ends: Ends, prices: Prices) -> tuple[Way, ...]:
    """Return the Pareto frontier, in seconds and bytes, of the ways that are best at some price and of their
    crossings."""
    found: list[Way] = []
    for again in (False, True):
        own = _best(layered, priced, hubs, ends, prices, again)
        found += own
        if own:
            found += crossings(layered, priced.piece, own, hubs, ends)
    return tuple(efficient(found))


def _best(
    layered: Layered, priced: Priced, hubs: Mapping[int, int], ends: Ends, prices: Prices, again: bool
) -> list[Way]:
    """Return the ways that are best at some price.

    Where a known way is as good at a price, no other is looked for there.
    """
    piece = priced.piece
    before, after = ends
    own = [hubs[h] for h in piece.hubs]
    first = len(prices) if again else 0
    # [prices]: the best priced seconds between the two states
    values = priced.at_hubs(own)[before, after, first : first + len(prices)]
    # [prices]: the priced seconds of the best way found so far
    best = np.full(len(prices), np.inf)
    found: list[Way] = []
    for number in np.flatnonzero(np.isfinite(values)):
        if best[number] <= values[number] * (1 + SAME):
            continue
        made = priced.choices(own, before, after, first + int(number))
        way = way_of(layered, piece, made, hubs, ends, again)
        best = np.minimum(best, way.seconds + prices.kept * way.kept + prices.resting * way.resting)
        found.append(way)
    return found


def efficient(ways: Sequence[Way]) -> list[Way]:
    """Return the Pareto frontier: the ways that no other one beats in seconds and in every kind of bytes."""
    answer: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.seconds, w.kept, w.resting, w.once, w.last)):
        if not any(
            o.kept <= way.kept and o.resting <= way.resting and o.once <= way.once and o.last <= way.last
            for o in answer
        ):
            answer.append(way)
    return answer


def crossings(
    layered: Layered, piece: ChainSegment, ways: Sequence[Way], hubs: Mapping[int, int], ends: Ends
) -> list[Way]:
    """Return combinations of these ways: the fastest one with some of the changes that lead to another.

    Nodes that change together and share an edge are one change. Changes that touch each other are not made together,
    since the edge between them would have a price that neither way has.
    """
    base = min(ways, key=lambda way: way.seconds)
    near: dict[int, set[int]] = {node: set() for node in piece.nodes}
    for i in piece.edges:
        first, second, _ = layered.chain.tables.edges[i]
        if first in near and second in near:
            near[first].add(second)
            near[second].add(first)
    changes: dict[tuple[tuple[int, int], ...], None] = {}
    for way in ways:
        apart = {node for node, choice in way.choices.items() if base.choices[node] != choice}
        while apart:
            part, edge = set(), {min(apart)}
            while edge:
                part |= edge
                apart -= edge
                edge = {other for node in edge for other in near[node]} & apart
            changes[tuple((node, way.choices[node]) for node in sorted(part))] = None
    listed = list(changes)[:CHANGES]
    sets = [{node for node, _ in change} for change in listed]
    around = [own | {other for node in own for other in near[node]} for own in sets]
    found = []
    for number in range(1, 2 ** len(listed)):
        taken = [i for i in range(len(listed)) if number >> i & 1]
        if len(taken) > 1 and all(not around[i] & sets[j] for i in taken for j in taken if i < j):
            made = {**base.choices, **dict(pair for i in taken for pair in listed[i])}
            found.append(way_of(layered, piece, made, hubs, ends, base.again))
    return found


def _apart(sizes: Sequence[int], nodes: Sequence[int], joint: int) -> list[int]:
    return [int(k) for k in np.unravel_index(joint, tuple(sizes[n] for n in nodes))] if nodes else []


def way_of(
    layered: Layered, piece: ChainSegment, made: Mapping[int, int], hubs: Mapping[int, int], ends: Ends, again: bool
) -> Way:
    """Return the way that makes these choices between these states, with its seconds and bytes from the tables."""
    seconds = last = resting = outside = kept = handed = given = gathered = 0.0
    tables = layered.chain.tables
    known = {**hubs, **dict(zip(piece.before, _apart(layered.chain.sizes, piece.before, ends[0]), strict=True)), **made}
    for node, choice in made.items():
        columns, inside = tables.columns[node], node in piece.inside
        seconds += float(columns.forward[choice] + columns.backward[choice])
        seconds += float(columns.again[choice]) if again and inside else 0.0
        last += once_at(columns, layered.weights, choice)
        resting += float(columns.resting[choice])
        if inside:
            kept += float(columns.kept[choice])
            gathered += float(columns.gathered[choice])
            handed += float(columns.handed[choice])
        else:
            outside += float(columns.kept[choice])
            given += float(columns.handed[choice])
    for i in piece.edges:
        first, second, table = tables.edges[i]
        seconds += float(table[known[first], known[second]])
    held, once = (outside + handed + given, kept + gathered) if again else (outside + kept, 0.0)
    return Way(dict(made), again, seconds + layered.share * last, resting, held, once, last)
