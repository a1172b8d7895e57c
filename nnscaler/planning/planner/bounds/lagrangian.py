"""The Lagrangian lower bound of a pipeline stage within a limit of memory, from stages of a chain at prices of memory.

Lagrangian relaxation (Everett 1963; Geoffrion 1974): instead of a limit, memory has a price. The bytes at rest, and
`live` times the bytes that a micro-batch keeps, fit into the memory of the stage. So at any prices per byte, the least
priced value of a stage, less the highest price of bytes that fit, is a lower bound of its seconds. The best bound is
that of the best price.

Tables here are [layers, states, states, prices]: by number of layers of a stage from 0 on, by the states of the cuts
that it begins and ends in, and by price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.equal_layer_chain import Chain, ChainSegment, Priced, price
from nnscaler.planning.planner.prune_dominated import WHOLE_PASS, Numbers, of_conversions, seconds_of
from nnscaler.planning.sharding.cost_tables import Column, Columns
from nnscaler.scheduling.schedule import Ramp
from nnscaler.transform.plan import DP

Pieces = tuple[Priced, Priced, Priced]  # head, layer, tail
ANY = -1  # number of layers of a stage that are run again
Kind = tuple[bool, bool, int]  # of a stage: the first one, the last one, how many layers are run again
Ends = frozenset[tuple[bool, bool]]
Halves = tuple[Numbers | None, Numbers, Numbers | None]  # of head, layer and tail


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of memory; both fields are [prices].

    kept      seconds per byte that a micro-batch keeps
    resting   seconds per byte that rests
    """

    kept: Numbers
    resting: Numbers

    def __len__(self) -> int:
        return len(self.kept)

    def with_more(self, other: Prices) -> Prices:
        return Prices(np.concatenate([self.kept, other.kept]), np.concatenate([self.resting, other.resting]))


def grid(chain: Chain, floors: Floors, low: float, high: float, count: int, lives: Numbers) -> Prices:
    """Return prices about the one at which recomputing a layer pays, and 0.

    They go from `low` to `high` times that price, in `count` geometric steps, for each of these numbers of live
    micro-batches: [len(lives) * count + 1]. Where none is alive, only what rests has a price.
    """
    columns = [chain.tables.columns[node] for node in chain.layer.inside]
    saved = max(floors.layer.kept - floors.layer.handed, 1.0)
    # seconds to run a layer once more, per byte that a micro-batch then does not keep
    base = max(sum(float(c.forward.min()) for c in columns), 1e-12) / saved
    scaled, live = (a.ravel() for a in np.meshgrid(base * np.geomspace(low, high, count), lives))
    return Prices(np.append(0.0, np.where(live > 0, scaled, 0.0)), np.append(0.0, scaled / np.where(live > 0, live, 1)))


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of the bytes of a piece, whatever its choices.

    resting   bytes of parameters, gradients and optimizer states
    outside   bytes that a micro-batch keeps outside of layers
    kept      bytes that a micro-batch keeps in the layer
    handed    bytes of a micro-batch that the layer hands on
    summed    bytes of gradients that are summed over dp
    once      seconds of a step beside these sums
    """

    resting: float
    outside: float
    kept: float
    handed: float
    summed: float
    once: float


@dataclass(frozen=True, slots=True)
class Floors:
    """The floors of the three pieces."""

    head: Floor
    layer: Floor
    tail: Floor


def floors_of(chain: Chain) -> Floors:
    """Return the floors of the pieces: of each node the least, whether these go together or not."""
    columns = chain.tables.columns

    def floor(piece: ChainSegment) -> Floor:
        every = [columns[node] for node in piece.nodes]
        inside = [columns[node] for node in piece.nodes if node in piece.inside]
        outside = [columns[node] for node in piece.nodes if node not in piece.inside]
        return Floor(
            sum(float(c.resting.min()) for c in every),
            sum(float(c.kept.min()) for c in outside),
            sum(float(c.kept.min()) for c in inside),
            sum(float(c.handed.min()) for c in inside),
            sum(float(c.summed[DP].min()) for c in every if DP in c.summed),
            sum(float(c.once.min()) for c in every),
        )

    return Floors(floor(chain.head), floor(chain.layer), floor(chain.tail))


@dataclass(frozen=True, slots=True)
class StageKind:
    """The place of a pipeline device. Here it is called a stage: where it has several stages, these are its chunks.

    live      micro-batches of its layers that are alive at once
    first     whether it has the first stage, and with it the head
    last      whether it has the last stage, and with it the tail
    received  passes that hold what another device sent, at once
    ends      messages of a micro-batch that it receives and sends in forward; None: one on each side that is no end
    chunks    stages on it, all of which begin and end in one state of the cut where there are several
    """

    live: float
    first: bool
    last: bool
    received: float
    ends: int | None = None
    chunks: int = 1


def stages_of(c: Configuration, late: bool = False) -> tuple[StageKind, ...]:
    """Return the stages of a pipeline. `late`: when a backward ends, so that one fewer micro-batch is alive."""
    if c.chunks == 1:
        lives = [c.live(s) - late for s in range(c.pp)]
        return tuple(StageKind(live, s == 0, s == c.pp - 1, live * (s > 0)) for s, live in enumerate(lives))
    devices, found = c.stage_devices, []
    for device in range(c.pp):
        own = [stage for stage, at in enumerate(devices) if at == device]
        arriving = [s for s in own if s and devices[s - 1] != device]
        leaving = [s for s in own if s < len(devices) - 1 and devices[s + 1] != device]
        live = c.live(device) - late
        received = sum(c.at_ends[1] if s == len(devices) - 1 else live for s in arriving)
        ends = len(arriving) + len(leaving)
        found.append(StageKind(live, 0 in own, len(devices) - 1 in own, received, ends, c.chunks))
    return tuple(found)


def ends_of(c: Configuration) -> Ends:
    """Return the different pairs (is the first stage, is the last stage) of all stages."""
    return frozenset((s.first, s.last) for s in stages_of(c))


def most_of(c: Configuration, layers: int) -> int:
    """Return the largest number of layers of a stage that is looked at: about twice the mean. More cost no less."""
    return min(layers - (c.pp - 1) * c.chunks, -(-2 * layers // c.pp) + 2)


def at_prices(
    chain: Chain,
    prices: Prices,
    recompute: bool | None,
    form: Ramp = WHOLE_PASS,
    beside: Callable[[Columns], Column] | None = None,
) -> Pieces:
    """Return the pieces at each price twice: with what layers keep, then with their layers recomputed.

    recompute   all layers, none, or those for which it pays (None)
    form        how often the seconds of F, I and W of a micro-batch count
    beside      returns what counts beside these, of each of a node's choices, in seconds: [choices]

    The tables of the pieces are [hubs, before, after, 2 * prices].
    """
    made: dict[tuple[int, bool], Numbers] = {}
    counted = chain.with_conversions(of_conversions(form))

    def costs(columns: Columns, inside: bool) -> Numbers:
        key = (id(columns), inside)
        if key not in made:
            # [choices]: seconds that count
            once = seconds_of(columns, form) + (0.0 if beside is None else beside(columns))
            # [choices, prices]: priced bytes at rest; priced seconds with activations kept, and with the layer
            # recomputed, which I waits for
            rests = columns.resting[:, None] * prices.resting
            kept = once[:, None] + columns.kept[:, None] * prices.kept + rests
            more = form[1] * columns.again
            again = (once + more)[:, None] + columns.handed[:, None] * prices.kept + rests
            if inside:
                kept, again = kept + np.inf if recompute else kept, again + np.inf if recompute is False else again
            made[key] = np.concatenate([kept, again if inside else kept], axis=1)
        return made[key]

    def piece(of: ChainSegment) -> Priced:
        return price(counted, of, {node: costs(chain.tables.columns[node], node in of.inside) for node in of.nodes})

    return piece(chain.head), piece(chain.layer), piece(chain.tail)


def values_of(
    pieces: Pieces, prices: int, most: int, states: int, ends: Ends, counted: bool = False
) -> dict[Kind, Numbers]:
    """Return, by kind of stage, the least priced seconds: [layers, states, states, prices].

    Only stages with one of these `ends` are made. The first stage begins in state 0, and the last one ends in it. Where
    a cut has more than `states` states they are not told apart: the tensor that is handed on may change its state for
    nothing, which makes the values smaller, and keeps bounds valid. With `counted`, there is an entry for every number
    of recomputed layers, else one for none and one for any number.
    """
    halves = []
    for part in (slice(None, prices), slice(prices, None)):
        # [before, after, prices], the best over the hubs, of one half of the prices: kept, then recomputed
        head, layer, tail = (p.table.min(axis=0)[..., part] for p in pieces)
        if layer.shape[0] > states:
            head, tail = head.min(axis=1, keepdims=True), tail.min(axis=0, keepdims=True)
            layer = layer.min(axis=(0, 1), keepdims=True)
        halves.append((head, layer, tail))
    found: dict[Kind, Numbers] = {}
    for first, last in ends:
        kept, again = ((h if first else None, layer, t if last else None) for h, layer, t in halves)
        if counted:
            found.update({(first, last, n): table for n, table in enumerate(_counted(kept, again, most))})
            continue
        # each layer by itself may be recomputed or not
        either = tuple(None if a is None or b is None else np.minimum(a, b) for a, b in zip(kept, again, strict=True))
        nothing = (None, np.full_like(layer, np.inf), None)
        for number, one in ((0, kept), (ANY, either)):
            found[first, last, number] = _counted(one, nothing, most, 0)[0]  # type: ignore[arg-type]
    return found


def limited(
    values: Mapping[Kind, Numbers],
    stages: Iterable[StageKind],
    floors: Floors,
    memory: float,
    prices: Prices,
    part: float = 1.0,
    shrinks: float = 1.0,
) -> dict[StageKind, tuple[Numbers, NDArray[np.int64]]]:
    """Return lower bounds of the seconds of each stage, and the number of the price that proves each.

    Both results are [layers, states, states]; a bound is infinite where the stage cannot fit. It is the best over
    prices, for the number of recomputed layers with which this is least. A micro-batch keeps `part` of what prices and
    floors count, and what rests is `shrinks` times as small on a rank.
    """
    alike: dict[tuple[bool, bool, int], list[StageKind]] = {}
    for stage in dict.fromkeys(stages):
        alike.setdefault((stage.first, stage.last, stage.chunks), []).append(stage)
    found: dict[StageKind, tuple[Numbers, NDArray[np.int64]]] = {}
    for (first, last, chunks), own in alike.items():
        tables = {number: table for (*ends, number), table in values.items() if ends == [first, last]}
        bounds, by = _limited(tables, own, floors, memory, prices, part, shrinks)
        bounds[:, : chunks if chunks > 1 else 0] = np.inf  # every stage has a layer
        found.update(zip(own, zip(bounds, by, strict=True), strict=True))
    return found


def _limited(
    tables: Mapping[int, Numbers],
    stages: Sequence[StageKind],
    floors: Floors,
    memory: float,
    prices: Prices,
    part: float,
    shrinks: float,
) -> tuple[Numbers, NDArray[np.int64]]:
    """Return `limited` for stages with the same ends: [stages, layers, states, states]. `tables` are by number of
    recomputed layers."""
    first, last, layer = stages[0].first, stages[0].last, floors.layer
    # [stages, 1]: micro-batches that are alive, and bytes that were received
    live = np.array([[stage.live * part] for stage in stages])
    received = np.array([[stage.received * part * layer.handed] for stage in stages])
    # [layers]: how many layers a stage has, and how many of these are in the middle
    counts = np.arange(len(next(iter(tables.values()))), dtype=np.float64)
    middle, ends = counts - first - last, [floors.head] * first + [floors.tail] * last
    # [layers]: floors of the bytes at rest, kept by a micro-batch in layers, and handed on
    resting = middle * layer.resting + sum(f.resting for f in ends)
    outside = sum(f.outside for f in ends)
    whole = middle * layer.kept + sum(f.kept for f in ends)
    handed = middle * layer.handed + sum(f.handed for f in ends)
    saved = max(f.kept - f.handed for f in (layer, *ends))
    best: Numbers | None = None
    at = np.zeros(0, dtype=np.int64)
    for number, table in tables.items():
        # one layer that is run again has all that it keeps once
        once = min(f.kept for f in (layer, *ends)) * part if number else 0.0
        room = memory - received - once  # [stages, 1]
        kept = outside + (handed if number == ANY else np.maximum(whole - number * saved, handed))
        # the dearest bytes that fit: all but the least that rests, or all but the least that is kept
        free = np.divide(room - resting / shrinks, live, out=np.zeros((len(stages), len(counts))), where=live > 0.0)
        most_kept = free[..., None] * prices.kept + resting[:, None] * prices.resting  # [stages, layers, prices]
        most_resting = shrinks * (room - live * kept)[..., None] * prices.resting + kept[:, None] * prices.kept
        # [stages, layers, states, states, prices]: the Lagrangian bound at each price
        value = table - np.maximum(most_kept, most_resting)[:, :, None, None, :]
        if not live.all():  # any number of bytes may be kept
            value[np.ix_(live[:, 0] == 0.0, *map(np.arange, value.shape[1:4]), prices.kept > 0.0)] = -np.inf
        value[resting / shrinks + live * kept > room] = np.inf
        # [stages, layers, states, states]: the best over prices; below, the least over how many are recomputed
        by = value.argmax(axis=-1)
        bound = np.take_along_axis(value, by[..., None], axis=-1)[..., 0]
        if best is None:
            best, at = bound, by
        else:
            best, at = np.minimum(best, bound), np.where(bound < best, by, at)
    assert best is not None
    return best, at


def _counted(kept: Halves, again: Halves, most: int, numbers: int | None = None) -> list[Numbers]:
    """Return, by number of recomputed layers up to `numbers`, the best paths: [layers, states, states, prices].

    A dynamic program over the layers of a stage; `kept` and `again` are head, layer and tail as they are and
    recomputed.
    """
    width, _, prices = kept[1].shape
    numbers = most if numbers is None else numbers
    answer = [np.full((most + 1, width, width, prices), np.inf) for _ in range(numbers + 1)]
    ends = (kept[0] is not None) + (kept[2] is not None)
    # [1 or states, states, prices] by the number of layers run again: the best paths so far; None before the first
    at: list[Numbers | None] = [kept[0], again[0]][: numbers + 1]
    for middle in range(most + 1 - ends):
        if middle:
            at = _longer(at, kept[1], again[1], numbers)
        ended = at if kept[2] is None else _longer(at, kept[2], again[2], numbers)
        for number, table in enumerate(ended):
            if table is not None:
                answer[number][middle + ends, : table.shape[0], : table.shape[1]] = table
    return answer


def _longer(at: Sequence[Numbers | None], kept: Numbers, again: Numbers | None, numbers: int) -> list[Numbers | None]:
    """Extend paths by one more piece, which is recomputed or not. Results are by number of recomputed layers."""
    found: list[Numbers | None] = []
    for number in range(min(len(at), numbers) + 1):
        options = []
        for before, piece in ((number, kept), (number - 1, again)):
            if piece is not None and 0 <= before < len(at):
                start = at[before]
                if start is not None:
                    options.append(_product(start, piece))
                elif before == 0:  # nothing comes before
                    options.append(piece)
        found.append(None if not options else options[0] if len(options) == 1 else np.minimum(*options))
    return found


def _product(first: Numbers, second: Numbers) -> Numbers:
    """Multiply tables [before, after, prices] in the (min, +) semiring, price by price."""
    answer = first[:, 0, None] + second[None, 0]
    for state in range(1, first.shape[1]):
        np.minimum(answer, first[:, state, None] + second[None, state], out=answer)
    return answer
