"""Stages of a chain at prices of memory, and what a limit of memory leaves of that: the Lagrangian bound of a stage.

What rests, and `live` times what a micro-batch keeps, fit into the memory of the stage. So at any prices per byte, the
priced value of a stage, less the most that bytes which fit can cost, is a bound of its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.planner.chain import Chain, Piece, Priced, price
from nnscaler.planning.planner.configurations import Configuration
from nnscaler.planning.sharding.tables import Column, Columns

Numbers = NDArray[np.float64]
Pieces = tuple[Priced, Priced, Priced]  # head, layer, tail
Kind = tuple[bool, bool, bool]  # of a stage: the first one, the last one, with layers that are run again
Ends = frozenset[tuple[bool, bool]]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds per byte that a micro-batch keeps, and per byte that rests: [prices] each."""

    kept: Numbers
    resting: Numbers

    def __len__(self) -> int:
        return len(self.kept)

    def with_more(self, other: Prices) -> Prices:
        return Prices(np.concatenate([self.kept, other.kept]), np.concatenate([self.resting, other.resting]))


def grid(chain: Chain, floors: Floors, low: float, high: float, count: int, lives: Numbers) -> Prices:
    """Prices about the one at which running a layer again pays, from `low` to `high` times as much, for these numbers
    of live micro-batches; and no price at all."""
    columns = [chain.tables.columns[node] for node in chain.layer.inside]
    saved = max(floors.layer.kept - floors.layer.handed, 1.0)
    base = max(sum(float(c.forward.min()) for c in columns), 1e-12) / saved
    kept, live = (a.ravel() for a in np.meshgrid(base * np.geomspace(low, high, count), lives))
    return Prices(np.append(0.0, kept), np.append(0.0, kept / live))


@dataclass(frozen=True, slots=True)
class Floor:
    """What no choices of a piece come below: bytes at rest, bytes that a micro-batch keeps outside of layers and in its
    layer, bytes handed on by its layer, bytes of gradients that are summed over dp."""

    resting: float
    outside: float
    kept: float
    handed: float
    summed: float


@dataclass(frozen=True, slots=True)
class Floors:
    """Of the pieces."""

    head: Floor
    layer: Floor
    tail: Floor


def floors_of(chain: Chain) -> Floors:
    """What no choices come below."""
    columns = chain.tables.columns

    def floor(piece: Piece) -> Floor:
        every = [columns[node] for node in piece.nodes]
        inside = [columns[node] for node in piece.nodes if node in piece.inside]
        outside = [columns[node] for node in piece.nodes if node not in piece.inside]
        return Floor(
            sum(float(c.resting.min()) for c in every),
            sum(float(c.kept.min()) for c in outside),
            sum(float(c.kept.min()) for c in inside),
            sum(float(c.handed.min()) for c in inside),
            sum(float(c.summed["dp"].min()) for c in every if "dp" in c.summed),
        )

    return Floors(floor(chain.head), floor(chain.layer), floor(chain.tail))


@dataclass(frozen=True, slots=True)
class Stage:
    """Its place decides how many micro-batches are alive, and what it has besides layers of the middle."""

    live: int
    first: bool
    last: bool


def stages_of(c: Configuration) -> tuple[Stage, ...]:
    """Of a pipeline with 1F1B."""
    return tuple(Stage(min(c.micro_batches, c.pp - s), s == 0, s == c.pp - 1) for s in range(c.pp))


def ends_of(c: Configuration) -> Ends:
    """(whether it is the first stage, whether it is the last one), of all stages."""
    return frozenset((s.first, s.last) for s in stages_of(c))


def most_of(c: Configuration, layers: int) -> int:
    """The largest number of layers of a stage that is looked at: more cost no less."""
    return min(layers - c.pp + 1, -(-2 * layers // c.pp) + 2)


def at_prices(chain: Chain, prices: Prices, recompute: bool | None, seconds: Callable[[Columns], Column]) -> Pieces:
    """The pieces at each price twice: with what layers keep, then with their layers run again. `seconds`: of a node's
    choices. `recompute`: all layers, none, or those for which it pays (None)."""
    made: dict[tuple[int, bool], Numbers] = {}

    def costs(columns: Columns, inside: bool) -> Numbers:
        key = (id(columns), inside)
        if key not in made:
            once = seconds(columns)
            rests = columns.resting[:, None] * prices.resting
            kept = once[:, None] + columns.kept[:, None] * prices.kept + rests
            again = (once + columns.forward)[:, None] + columns.handed[:, None] * prices.kept + rests
            if inside:
                kept, again = kept + np.inf if recompute else kept, again + np.inf if recompute is False else again
            made[key] = np.concatenate([kept, again if inside else kept], axis=1)
        return made[key]

    def piece(of: Piece) -> Priced:
        return price(chain, of, {node: costs(chain.tables.columns[node], node in of.inside) for node in of.nodes})

    return piece(chain.head), piece(chain.layer), piece(chain.tail)


def values_of(pieces: Pieces, prices: int, most: int, states: int, ends: Ends) -> dict[Kind, Numbers]:
    """By kind of stage, of those with these ends: [layers, states, states, prices], the best priced seconds. What
    begins or ends the whole does so in state 0. Where a cut has more than `states`, they are not told apart: what is
    handed on may change its state for nothing."""
    found: dict[Kind, Numbers] = {}
    for again in (False, True):
        head, layer, tail = (_either(p.table.min(axis=0), prices, again) for p in pieces)
        if layer.shape[0] > states:
            head, tail = head.min(axis=1, keepdims=True), tail.min(axis=0, keepdims=True)
            layer = layer.min(axis=(0, 1), keepdims=True)
        for first, last in ends:
            found[first, last, again] = _paths(head if first else None, layer, tail if last else None, most)
    return found


def limited(
    values: Mapping[Kind, Numbers], stage: Stage, live: float, floors: Floors, memory: float, prices: Prices
) -> Numbers:
    """[layers, states, states, prices]: bounds of the seconds of a stage, one at each price. Infinite where it cannot
    fit."""
    head, layer, tail = floors.head, floors.layer, floors.tail
    counts = np.arange(len(values[stage.first, stage.last, False]), dtype=np.float64)
    middle, ends = counts - stage.first - stage.last, [head] * stage.first + [tail] * stage.last
    resting = middle * layer.resting + sum(f.resting for f in ends)
    received = 0.0 if stage.first else live * layer.handed
    found = []
    for again in (False, True):
        # one layer that is run again has all that it keeps once
        once = min(f.kept for f in (layer, *ends)) * live / stage.live if again else 0.0
        room = memory - received - once
        kept = middle * (layer.handed if again else layer.kept)
        kept = kept + sum(f.outside + (f.handed if again else f.kept) for f in ends)
        # the dearest bytes that fit: all but the least that rests, or all but the least that is kept
        most_kept = ((room - resting) / live)[:, None] * prices.kept + resting[:, None] * prices.resting
        most_resting = (room - live * kept)[:, None] * prices.resting + kept[:, None] * prices.kept
        value = values[stage.first, stage.last, again] - np.maximum(most_kept, most_resting)[:, None, None, :]
        value[resting + live * kept > room] = np.inf
        found.append(value)
    return np.minimum(*found)


def _paths(head: Numbers | None, layer: Numbers, tail: Numbers | None, most: int) -> Numbers:
    width, _, prices = layer.shape
    answer = np.full((most + 1, width, width, prices), np.inf)
    ends = (head is not None) + (tail is not None)
    at = head  # [1 or states, states, prices]: the best path so far
    for middle in range(most + 1 - ends):
        if middle:
            at = layer if at is None else _product(at, layer)
        ended = at if tail is None else tail if at is None else _product(at, tail)
        if ended is not None:
            answer[middle + ends, : ended.shape[0], : ended.shape[1]] = ended
    return answer


def _product(first: Numbers, second: Numbers) -> Numbers:
    """The best over the state in the middle, by price."""
    answer = first[:, 0, None] + second[None, 0]
    for state in range(1, first.shape[1]):
        np.minimum(answer, first[:, state, None] + second[None, state], out=answer)
    return answer


def _either(table: Numbers, count: int, again: bool) -> Numbers:
    """With or without the second half of the prices, in which layers are run again."""
    kept, computed = table[..., :count], table[..., count:]
    return np.minimum(kept, computed) if again else kept
