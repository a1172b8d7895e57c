"""Mix two ways to run a layer in every stage, so that a pipeline of many equal layers fits into memory.

A stage runs its layers in one state of the cut, and may turn to another with its last one. For its layers it takes the
two ways whose mix is fastest within its memory, each a whole number of times: the linear relaxation of a choice of ways
under one limit has an optimum that mixes two (as in the multiple-choice knapsack problem, Sinha and Zoltners 1979).
Then the layers, and the states between stages, are spread over the stages so that a step is shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.planner.bounds.equal_layer_pipeline import Layered, adding
from nnscaler.planning.planner.bounds.lagrangian import Pieces, Prices, StageKind
from nnscaler.planning.planner.equal_layer_chain import Priced
from nnscaler.planning.planner.layer_time_memory_tradeoffs import Ends, Way, ways_of
from nnscaler.planning.planner.prune_dominated import Numbers
from nnscaler.planning.planner.stage_partition_dp import StagePartition, best_cut

STATES = 4  # of the cut that are tried
LEVELS = 3  # of what ways leave to the end of a step, up to which they are taken
HUBS = 3  # choices of what all layers read that are tried
SLACK = 0.05  # by which share more may be left to the end of a step than by the way that leaves least


@dataclass(frozen=True, slots=True)
class StageFill:
    """The layers of a stage.

    head     the first piece of the model, on the first stage
    ways     the two ways of the layers in the middle; None without such layers
    often    how many of these run the first way
    layers   how many layers are in the middle
    turn     a last layer that ends in another state
    tail     the last piece of the model, on the last stage
    """

    head: Way | None
    ways: tuple[Way, Way] | None
    often: int
    layers: int
    turn: Way | None
    tail: Way | None

    def __iter__(self) -> Iterator[Way]:
        """Yield the way of every layer."""
        if self.head is not None:
            yield self.head
        if self.ways is not None:
            yield from [self.ways[0]] * self.often
            yield from [self.ways[1]] * (self.layers - self.often)
        yield from (way for way in (self.turn, self.tail) if way is not None)

    def in_chunks(self, chunks: int) -> list[list[Way]]:
        """Return the ways of the layers of each stage of the device: as many in each, and as alike as they can be."""
        middle = list(self)[self.head is not None : None if self.tail is None else -1]
        each, more = divmod(len(list(self)), chunks)
        room = [each + (number < more) for number in range(chunks)]
        made: list[list[Way]] = [[] for _ in range(chunks)]
        if self.head is not None:
            made[0].append(self.head)
        for way in middle:
            left = [room[k] - len(made[k]) - (self.tail is not None and k == chunks - 1) for k in range(chunks)]
            made[left.index(max(left))].append(way)
        if self.tail is not None:
            made[-1].append(self.tail)
        return made

    def price(self, live: float) -> float:
        """Return the seconds of a micro-batch per byte of memory between both ways; 0 where only one is used."""
        if self.ways is None or self.often == self.layers:
            return 0.0
        fast, small = self.ways
        saved = fast.resting - small.resting + live * (fast.kept - small.kept)
        return (small.seconds - fast.seconds) / saved if saved > 0.0 else 0.0


@dataclass(frozen=True)
class Ways:
    """The ways to run each piece.

    head    by the state of the cut that it ends in
    layer   by the states that it begins and ends in
    tail    by the state that it begins in
    """

    head: Mapping[int, tuple[Way, ...]]
    layer: Mapping[Ends, tuple[Way, ...]]
    tail: Mapping[int, tuple[Way, ...]]

    def ending(self, most: float) -> Ways:
        """Return the ways with no more than `most` seconds at the end of a step, and a share of `SLACK` more."""
        return self._of(lambda way: way.last <= most * (1 + SLACK))

    def without_recomputation(self) -> Ways:
        """Return the ways whose layers are not computed again."""
        return self._of(lambda way: not way.again)

    def _of(self, kind: Callable[[Way], bool]) -> Ways:
        head = {state: tuple(filter(kind, own)) for state, own in self.head.items()}
        layer = {ends: tuple(filter(kind, own)) for ends, own in self.layer.items()}
        return Ways(head, layer, {state: tuple(filter(kind, own)) for state, own in self.tail.items()})


def fill(
    layered: Layered, prices: Prices, cut: StagePartition, limits: Sequence[float]
) -> Iterator[tuple[StageFill, ...]]:
    """Yield the stages of the fastest pipelines that are found to fit into `limits`, bytes by device.

    They are made from all ways, then from those alone that leave less and less to the end of the step. `cut` is that of
    the bound; its states are tried first, with others that are good for many layers.
    """
    pieces = layered.at(prices)
    for hubs in _hubs(layered, pieces):
        yield from _fill(layered, prices, cut, limits, pieces, hubs)


def _fill(
    layered: Layered,
    prices: Prices,
    cut: StagePartition,
    limits: Sequence[float],
    pieces: Pieces,
    hubs: Mapping[int, int],
) -> Iterator[tuple[StageFill, ...]]:
    """Yield the pipelines with these choices of the hubs."""
    head, layer, tail = pieces
    used = dict.fromkeys(end for ends in cut.states for end in ends if cut.states)
    states = list(dict.fromkeys((*_states(layer, hubs), *used)))[:STATES]
    turns = {ends for ends in cut.states if ends[0] != ends[1]} | {(a, a) for a in states}

    def ways(piece: Priced, ends: Ends) -> tuple[Way, ...]:
        return ways_of(layered, piece, hubs, ends, prices)

    found = Ways(
        {state: ways(head, (0, state)) for state in states},
        {(a, b): ways(layer, (a, b)) for a, b in product(states, states) if (a, b) in turns},
        {state: ways(tail, (state, 0)) for state in states},
    )
    parts = [own for part in (found.head, found.layer, found.tail) for own in part.values() if own]
    least = max((min(way.last for way in own) for own in parts), default=0.0)
    more = sorted({way.last for own in parts for way in own if way.last > least * (1 + SLACK)})
    levels = [more[i] for i in np.unique(np.linspace(0, len(more) - 1, LEVELS).astype(int))] if more else []
    made: list[tuple[StageFill, ...]] = []
    for part in (found, *(found.ending(level) for level in (least, *levels[:-1]) if more)):
        stages = _spread(layered, part, states, limits)
        if stages is not None and stages not in made:
            made.append(stages)
            yield stages


def _hubs(layered: Layered, pieces: Sequence[Priced]) -> Iterator[dict[int, int]]:
    """Yield choices of all hubs that are best for all pieces together at some price of memory, those of no price first.

    A table of tokens that the head reads too, for example, is whole where memory is cheap, and split where it is dear.
    """
    hubs = layered.chain.hubs
    sizes = tuple(layered.chain.sizes[hub] for hub in hubs)
    often = (1, layered.layers - 2, 1)
    half = pieces[0].table.shape[-1] // 2
    # [choices of each hub ..., prices]: priced seconds of all pieces, each as often as it stands in the model
    total = np.zeros((*sizes, half))
    for piece, times in zip(pieces, often, strict=True):
        # [hubs of the piece, 2 * prices], the best over the cuts; below, the better of kept and recomputed
        best = piece.table.min(axis=(1, 2))
        shape = [n if hub in piece.piece.hubs else 1 for hub, n in zip(hubs, sizes, strict=True)]
        total = total + times * np.minimum(best[:, :half], best[:, half:]).reshape(*shape, half)
    numbers = dict.fromkeys(total.reshape(-1, half).argmin(axis=0).tolist())
    for number in list(numbers)[:HUBS]:
        at = np.unravel_index(number, sizes) if hubs else ()
        yield dict(zip(hubs, map(int, at), strict=True))


def _states(layer: Priced, hubs: Mapping[int, int]) -> list[int]:
    """Return the states of the cut in which some layer is best at some price, the most frequent first."""
    table = layer.at_hubs([hubs[h] for h in layer.piece.hubs])
    own = table[np.arange(table.shape[0]), np.arange(table.shape[0])]  # [states, prices]
    legal = np.isfinite(own).any(axis=0)
    best, counts = np.unique(own[:, legal].argmin(axis=0), return_counts=True)
    return [int(best[i]) for i in np.argsort(-counts, kind="stable")]


def _spread(
    layered: Layered, ways: Ways, states: Sequence[int], limits: Sequence[float]
) -> tuple[StageFill, ...] | None:
    stages = list(zip(layered.stages, limits, strict=True))
    found = {(stage, limit): _fastest(layered, ways, stage, states, limit) for stage, limit in set(stages)}
    # [stages, layers, states, states]: the fastest mixes of all stages
    seconds = np.stack([_table(found[stage], layered.most, len(states)) for stage in stages])
    c = layered.configuration
    cut = best_cut(seconds, layered.layers, c.repeats, adding(seconds, c.ramp, layered.added))
    if cut is None:
        return None
    fills = []
    for stage, count, ends in zip(stages, cut.layers, cut.states, strict=True):
        mixes = min(found[stage][ends], key=lambda m: m.seconds[count])
        fills.append(mixes.fill(count))
    return tuple(fills)


@dataclass(frozen=True, eq=False)
class Mixes:
    """The fastest stages between two states, by number of layers. The arrays are [layers].

    fixed     the combinations of head, turn and tail
    layers    the ways that a layer in the middle may run
    seconds   of the fastest stage; infinite where none fits
    taken     which of `fixed` it has
    first     which of `layers` comes first
    second    which of `layers` follows
    often     how many layers run the first way
    """

    fixed: tuple[tuple[Way | None, Way | None, Way | None], ...]
    layers: Sequence[Way]
    seconds: Numbers
    taken: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    often: NDArray[np.int64]

    def fill(self, count: int) -> StageFill:
        """Return the stage of `count` layers."""
        head, turn, tail = self.fixed[self.taken[count]]
        middle = count - sum(way is not None for way in (head, turn, tail))
        pair = (self.layers[self.first[count]], self.layers[self.second[count]]) if middle else None
        return StageFill(head, pair, int(self.often[count]), middle, turn, tail)


def _table(found: Mapping[Ends, Sequence[Mixes]], most: int, states: int) -> Numbers:
    """Return the seconds of the fastest stages: [layers, states, states]."""
    seconds = np.full((most + 1, states, states), np.inf)
    for (begin, end), every in found.items():
        seconds[:, begin, end] = np.min([mixes.seconds for mixes in every], axis=0)
    return seconds


def _fastest(
    layered: Layered, ways: Ways, stage: StageKind, states: Sequence[int], limit: float
) -> dict[Ends, list[Mixes]]:
    """Return the fastest mixes that fit into `limit` bytes, by the states that a stage begins and ends in.

    States are numbered as they are listed. The first stage begins in the first state, and the last one ends in it.
    """
    found: dict[Ends, list[Mixes]] = {}
    none: tuple[Way | None, ...] = (None,)
    useful: dict[int, list[Way]] = {}
    c = layered.configuration
    in_halves = any(c.figures.in_halves(device, c.chunks) for device in range(c.pp))
    if in_halves and not (stage.first and stage.chunks == 1):  # what is computed again is kept until W
        ways = ways.without_recomputation()
    for a, b in ways.layer:
        if (a != b and (stage.first or stage.last or stage.chunks > 1)) or not ways.layer[a, a]:
            continue
        both = stage.first and stage.last and stage.chunks > 1  # others begin in the state in which it ends
        begin, end = 0 if stage.first else states.index(a), 0 if stage.last and not both else states.index(b)
        received = stage.received * layered.chain.handed[a]
        sent = (0.0 if stage.first else layered.sent[a]) + (0.0 if stage.last else layered.sent[b])
        if stage.ends is not None:
            sent = stage.ends * layered.sent[a]
        if a not in useful:
            useful[a] = _useful(ways.layer[a, a], stage.live)
        heads = _useful(ways.head[a], stage.live) if stage.first else none
        turns = _useful(ways.layer[a, b], stage.live) if a != b else none
        tails = _useful(ways.tail[b], stage.live) if stage.last else none
        fixed = tuple(product(heads, turns, tails))
        if fixed:
            mixes = _mixes(fixed, useful[a], stage.live, limit - received, sent, layered.most)
            mixes.seconds[: stage.chunks] = np.inf  # every stage has a layer
            found.setdefault((begin, end), []).append(mixes)
    return found


def _useful(ways: Sequence[Way], live: float) -> list[Way]:
    """Return the ways on the Pareto frontier of seconds and bytes, with `live` live micro-batches."""
    answer: list[Way] = []
    least = np.inf
    for way in sorted(ways, key=lambda w: (w.seconds, w.resting + live * w.kept + w.once)):
        if way.resting + live * way.kept < least:
            least = way.resting + live * way.kept
            answer.append(way)
    return answer


def _mixes(
    fixed: tuple[tuple[Way | None, Way | None, Way | None], ...],
    layers: Sequence[Way],
    live: float,
    memory: float,
    sent: float,
    most: int,
) -> Mixes:
    """Return, for up to `most` layers, the fastest stage that fits into `memory` bytes.

    Any of `fixed` is taken, with the fastest mix of two ways for the other layers in the memory that it leaves. Of
    bytes that are there once (of a layer that runs again), the largest number counts. `sent`: seconds that every such
    stage takes in addition.
    """
    # [fixed]: bytes that each combination leaves, bytes that it needs once, and its seconds
    kept = [[way for way in ways if way is not None] for ways in fixed]
    room = np.array([memory - sum(way.resting + live * way.kept for way in ways) for ways in kept])
    once = np.array([max((way.once for way in ways), default=0.0) for ways in kept])
    base = np.array([sum(way.seconds for way in ways) for ways in kept]) + sent
    # [ways]: seconds and bytes of one layer
    time = np.array([way.seconds for way in layers])
    bytes_ = np.array([way.resting + live * way.kept for way in layers])
    # [pairs]: a faster way and one that needs less, or one way twice
    a, b = (i.ravel() for i in np.meshgrid(np.arange(len(layers)), np.arange(len(layers)), indexing="ij"))
    useful = (time[a] <= time[b]) & ((bytes_[a] > bytes_[b]) | (a == b))
    a, b = a[useful], b[useful]
    # [counts]: layers in the middle
    counts = np.arange(most + 1 - len(kept[0]))
    many, single = counts[None, :, None], np.maximum(np.array([way.once for way in layers]), once[:, None])
    # [fixed, counts, pairs]: bytes that are left when all layers run the smaller way
    left = (room[:, None] - np.maximum(single[:, a], single[:, b]))[:, None] - many * bytes_[b]
    # [fixed, counts, pairs]: how many layers may run the faster way in the bytes that are left
    fewer = bytes_[a] - bytes_[b]
    often = np.clip(np.floor(left / np.where(fewer > 0.0, fewer, np.inf)), 0.0, many)
    # all layers run the first way: what the second one needs once is not there
    alone = (room[:, None] - single[:, a])[:, None] - many * bytes_[a] >= 0.0
    often = np.where(alone, many, often)
    # [fixed, counts, pairs]: seconds of the middle layers; infinite where they do not fit
    seconds = np.where((left >= 0.0) | alone, often * time[a] + (many - often) * time[b], np.inf)
    seconds[:, 0] = 0.0
    seconds[room < once] = np.inf
    # [fixed, counts]: the best pair, and the seconds of the stage with it
    best = seconds.argmin(axis=2)
    least = base[:, None] + np.take_along_axis(seconds, best[..., None], axis=2)[..., 0]
    # [counts]: the best combination, and its pair
    taken = least.argmin(axis=0)
    pair = best[taken, counts]
    own = [least[taken, counts], taken, a[pair], b[pair], often[taken, counts, pair].astype(np.int64)]
    if not kept[0]:  # every stage has a layer
        own[0][0] = np.inf
    # [layers]: with fewer layers than the combination has, there is no such stage
    before = [np.full(len(kept[0]), np.inf), *(np.zeros(len(kept[0]), np.int64) for _ in own[1:])]
    return Mixes(fixed, layers, *(np.concatenate(both) for both in zip(before, own, strict=True)))
