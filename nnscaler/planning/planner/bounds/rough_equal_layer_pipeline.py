"""Rough lower bounds of a pipeline of many equal layers, from the chain of larger micro-batches and with few prices.

They are those of `bounds/equal_layer_pipeline.py`, but for what they leave out: states of a cut are not told apart,
parameters rest whole and shrink by as much as they may, and one chain serves all numbers of parts of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.bounds.equal_layer_pipeline import HIGH, LOW, added_of, adding, around, between
from nnscaler.planning.planner.bounds.lagrangian import (
    Ends,
    Floors,
    Kind,
    Pieces,
    Prices,
    at_prices,
    ends_of,
    floors_of,
    grid,
    limited,
    most_of,
    stages_of,
    values_of,
)
from nnscaler.planning.planner.equal_layer_chain import Chain
from nnscaler.planning.planner.prune_dominated import Numbers
from nnscaler.planning.planner.stage_partition_dp import best_cut
from nnscaler.planning.sharding.zero_stages import Rates

ROUGH, ROUGH_LIVES = 6, 5  # prices, and numbers of live micro-batches


@dataclass(frozen=True, slots=True)
class Least:
    """Lower bounds for a rank of a tensor-parallel group that runs the whole graph on the whole batch, part by part.

    seconds   forward and backward
    again     seconds of running all layers forward once more
    resting   bytes at rest
    kept      bytes that all micro-batches together keep in layers
    handed    bytes that all micro-batches together hand on from layer to layer
    summed    bytes of gradients summed over dp
    """

    seconds: float
    again: float
    resting: float
    kept: float
    handed: float
    summed: float


@dataclass(frozen=True)
class Rough:
    """Bounds for every number of parts of the batch, from the chain of one of `parts` equal parts.

    One of `parts` takes no longer than the smaller parts that make it up, one after another; so its seconds and kept
    bytes, scaled by the size of a part, bound those of more parts. States of a cut are not told apart.

    chain    the pieces for one of `parts`
    layers   how many layers the model has
    batch    samples in the batch
    parts    into how many the batch is cut for the chain
    """

    chain: Chain
    layers: int
    batch: int
    parts: int
    _known: dict[tuple[int, Ends], dict[Kind, Numbers]] = field(default_factory=dict)

    @cached_property
    def floors(self) -> Floors:
        return floors_of(self.chain)

    @cached_property
    def _priced(self) -> tuple[Pieces, Prices]:
        lives = np.geomspace(self.parts / self.batch, self.layers, ROUGH_LIVES)
        prices = grid(self.chain, self.floors, LOW, HIGH, ROUGH, lives)
        pieces = at_prices(self.chain, prices, None)
        return pieces, prices

    def _values(self, most: int, ends: Ends) -> dict[Kind, Numbers]:
        """Return the priced seconds of stages of at least `most` layers."""
        size = min(self.layers, 1 << (most - 1).bit_length())
        if (size, ends) not in self._known:
            pieces, prices = self._priced
            self._known[size, ends] = values_of(pieces, len(prices), size, 1, ends)
        return self._known[size, ends]

    @cached_property
    def least(self) -> Least:
        """Lower bounds of time and memory over all choices, without a limit of memory."""
        free = Prices(np.zeros(1), np.zeros(1))
        pieces = at_prices(self.chain, free, False)
        values = values_of(pieces, 1, self.layers, 1, frozenset({(True, True)}))
        floors, inside = self.floors, self.layers - 2
        columns = self.chain.tables.columns
        ends, piece = (floors.head, floors.tail), self.chain.layer
        again = [
            sum(float(columns[node].again.min()) for node in part.inside)
            for part in (self.chain.head, piece, self.chain.tail)
        ]

        def whole(name: str) -> float:
            return inside * float(getattr(floors.layer, name)) + sum(float(getattr(end, name)) for end in ends)

        return Least(
            float(values[True, True, 0][-1, 0, 0, 0]) * self.parts,
            (inside * again[1] + again[0] + again[2]) * self.parts,
            whole("resting"),
            whole("kept") * self.parts,
            whole("handed") * self.parts,
            whole("summed"),
        )

    def bound(
        self,
        c: Configuration,
        memory: float,
        rates: Rates,
        uncut: tuple[float, float, float],
        each: float,
        sent: Numbers,
        shrinks: float,
    ) -> float:
        """Bound the seconds of a step; infinite where nothing fits.

        memory    bytes of a rank
        rates     seconds per byte of gradients summed over dp
        uncut     of head, layer and tail, the most bytes of gradients of parameters that may rest whole
        each      seconds in which a micro-batch gathers a layer's parameters (ZeRO-3)
        sent      by state of the cut, seconds in which a stage hands a micro-batch on
        shrinks   how many times fewer bytes rest on a rank, at most, than where all rests whole
        """
        values, prices = self._values(most_of(c, self.layers), ends_of(c)), self._priced[1]
        if c.recompute is False:
            values = {kind: np.full_like(v, np.inf) if kind[2] != 0 else v for kind, v in values.items()}
        most, part, stages = most_of(c, self.layers), self.parts / c.parts, stages_of(c)
        counts = np.arange(most + 1)
        floors = self.floors
        cut = {kind: found[: most + 1] for kind, found in values.items()}
        made = {}
        for stage, (bounds, _) in limited(cut, stages, floors, memory, prices, part, shrinks).items():
            middle = counts - stage.first - stage.last
            # [layers]: bytes of gradients, and of those the most that are of parameters that may rest whole
            head, layer, tail = uncut
            summed = middle * floors.layer.summed
            summed = summed + stage.first * floors.head.summed + stage.last * floors.tail.summed
            whole = np.minimum(summed, middle * layer + stage.first * head + stage.last * tail)
            # [layers]: seconds of a micro-batch that do not depend on states
            moved = rates.least / c.turns * whole + (rates.once / c.turns + rates.each) * (summed - whole)
            more = moved + each * np.maximum(middle, 0)
            held = around(stage, bounds)
            made[stage] = part * held + more[:, None, None] + between(stage, sent, bounds.shape[-1])
        # [stages, layers, states, states]: seconds of a micro-batch at least
        seconds = np.stack([made[stage] for stage in stages])
        added = added_of(c, stages, self.chain, most, part)
        found = best_cut(seconds, self.layers, c.repeats, adding(seconds, c.ramp, added))
        return np.inf if found is None else found.value
