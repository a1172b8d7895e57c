"""Lower bounds for a pipeline of many equal layers under a limit of memory, for all cuts and all choices of layers.

Every stage has a bound for every number of layers, by Lagrangian relaxation (see `lagrangian.py`). The layers are
then spread over the stages so that a step is shortest by these bounds (see `stage_partition_dp`). A step takes the sum
of the stages' seconds, the largest as often again as its schedule repeats it (1F1B: micro-batches - 1), and the work
that is done once per step, on the stage that has most of it. Where all have about as much, each stage counts 1 /
(repeats + stages) of it: the sum and the largest then make up no more than the whole. Where one stage has much more
(the one with the embedding), the least that this can be is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.planning.planner.bounds.lagrangian import (
    Floors,
    Pieces,
    Prices,
    StageKind,
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
from nnscaler.planning.planner.prune_dominated import WHOLE_PASS, Numbers, of_conversions
from nnscaler.planning.planner.stage_partition_dp import StagePartition, Together, best_cut
from nnscaler.planning.sharding.build_problem import Weights, once_of
from nnscaler.scheduling.schedule import Ramp
from nnscaler.transform.plan import DP

LOW, HIGH = 1 / 512, 64  # of the prices, in prices at which running a layer again pays
COARSE, FINE = 12, 8  # prices of the first grid, and between the neighbours of one that binds in the second
COUNTED = 24  # layers of a stage up to which bounds tell apart how many are run again
EVEN = 0.7  # share of the largest part of what is done once per step
LIVES = 6  # numbers of live micro-batches that prices are made for
BINDING = 10  # prices that bind, about which finer ones are tried
STATES = 8  # of a cut that are told apart


@dataclass(frozen=True, slots=True, eq=False)
class LayeredBound:
    """A lower bound of a step, and what proves it.

    value     seconds; infinite where nothing fits
    prices    of memory
    cut       of the layers; None where nothing fits
    seconds   lower bounds of the stages: [stages, layers, states, states]
    binding   by stage, the number of the price that proves it, of those tried first; of the same shape
    """

    value: float
    prices: Prices
    cut: StagePartition | None
    seconds: Numbers
    binding: NDArray[np.int64]


@dataclass(frozen=True)
class Layered:
    """A chain in a configuration.

    chain           the pieces
    layers          how many layers the model has
    configuration   dp, tp, pp, micro-batches, recomputation
    weights         how the parts of a step count
    memory          bytes of a rank
    sent            by state of the cut, seconds in which a stage hands a micro-batch on
    late            whether bytes, those of the chain too, are those of the moment when a backward ends
    """

    chain: Chain
    layers: int
    configuration: Configuration
    weights: Weights
    memory: float
    sent: Numbers
    late: bool = False

    @property
    def stages(self) -> tuple[StageKind, ...]:
        return stages_of(self.configuration, self.late)

    @property
    def share(self) -> float:
        """Share of the work once per step that counts in every micro-batch of every stage."""
        return 1 / self.configuration.turns if self._even else 0.0

    @cached_property
    def _even(self) -> bool:
        """True where the stages have about as much to do once per step."""
        floors, c = self.floors, self.configuration
        name = "once" if floors.layer.once else "summed"
        head, layer, tail = (float(getattr(floor, name)) for floor in (floors.head, floors.layer, floors.tail))
        return c.pp == 1 or layer * self.layers / c.pp >= EVEN * max(head, tail)

    @property
    def once(self) -> float:
        """Lower bound of the seconds that are spent once per step, where these are not shared among micro-batches."""
        rate = self.weights.rates.get(DP, 0.0)
        most = max(rate * floor.summed + floor.once for floor in (self.floors.head, self.floors.tail))
        return 0.0 if self._even else most

    @cached_property
    def floors(self) -> Floors:
        return floors_of(self.chain)

    @property
    def most(self) -> int:
        return most_of(self.configuration, self.layers)

    def at(self, prices: Prices, form: Ramp = WHOLE_PASS) -> Pieces:
        """Eliminate the pieces at these prices, with F, I and W counted so often."""
        again = self.configuration.recompute
        return at_prices(self.chain, prices, again, form, lambda own: self.share * once_of(own, self.weights))

    @cached_property
    def added(self) -> Numbers | None:
        """The least that each device adds to a step, by its layers: [stages, layers]; None where that is a part of its
        seconds alone."""
        return added_of(self.configuration, self.stages, self.chain, self.most)

    def together(self, prices: Prices) -> Together | None:
        """Return what each device takes and adds, together; None where it adds a part of its seconds alone."""
        c, form = self.configuration, ramp_of(self.configuration, self.chain)
        if form is None:
            return None
        often = c.repeats / c.pp
        f, i, w = (1.0 + one / often for one in form)
        return Together(self.lower(prices, (f, i, w))[0], often)

    @cached_property
    def coarse(self) -> LayeredBound:
        """The bound of a step at prices that lie far apart."""
        numbers = [stage.live for stage in self.stages]
        lives = np.unique(np.round(np.geomspace(1, max(1.0, *numbers), LIVES))) if max(numbers) else np.zeros(0)
        lives = lives if min(numbers) else np.append(0.0, lives)
        prices = grid(self.chain, self.floors, LOW, HIGH, COARSE, lives)
        return self._bound(prices, self.lower(prices))

    @cached_property
    def bound(self) -> LayeredBound:
        """The bound of a step, with finer prices about those that bind at first."""
        first = self.coarse
        refined = None if first.cut is None else self._refined(first.prices, first.binding, first.cut)
        if refined is None or not len(refined):
            return first
        seconds, prices = np.maximum(first.seconds, self.lower(refined)[0]), first.prices.with_more(refined)
        return self._bound(prices, (seconds, first.binding), self.together(refined))

    def _bound(
        self, prices: Prices, stages: tuple[Numbers, NDArray[np.int64]], together: Together | None = None
    ) -> LayeredBound:
        cut = self._cut(stages[0], together)
        return LayeredBound(np.inf if cut is None else cut.value + self.once, prices, cut, *stages)

    def _cut(self, seconds: Numbers, together: Together | None = None) -> StagePartition | None:
        c = self.configuration
        return best_cut(seconds, self.layers, c.repeats, adding(seconds, c.ramp, self.added), together)

    def _refined(self, prices: Prices, binding: NDArray[np.int64], cut: StagePartition) -> Prices:
        """Return finer prices about those that bind in the stages of a cut, for the stages' own numbers of live
        micro-batches."""
        step = (HIGH / LOW) ** (1 / (COARSE - 1))
        around = np.geomspace(1 / step, step, FINE + 2)[1:-1]
        taken = zip(self.stages, binding, cut.layers, cut.states, strict=True)
        bound = [(stage.live, int(best[count, a, b])) for stage, best, count, (a, b) in taken]
        at = {(float((prices.kept if live else prices.resting)[number]), live) for live, number in bound}
        wanted = sorted((price, live) for price, live in at if price > 0.0)
        wanted = [wanted[i] for i in np.unique(np.linspace(0, len(wanted) - 1, BINDING).astype(int))] if wanted else []
        scaled = np.array([price * factor for price, _ in wanted for factor in around])
        live = np.array([live for _, live in wanted for _ in around])
        return Prices(np.where(live > 0, scaled, 0.0), scaled / np.maximum(live, 1))

    def lower(self, prices: Prices, form: Ramp = WHOLE_PASS) -> tuple[Numbers, NDArray[np.int64]]:
        """Return lower bounds of the seconds of a micro-batch in each stage, with F, I and W counted so often, and the
        number of the price that proves each.

        Both are [stages, layers, states, states]: by the number of layers and the states of the cut that the stage
        begins and ends in.
        """
        stages = self.stages
        ends = ends_of(self.configuration)
        values = values_of(self.at(prices, form), len(prices), self.most, STATES, ends, counted=self.most <= COUNTED)
        best = limited(values, stages, self.floors, self.memory, prices)
        sent = of_conversions(form) * self.sent  # as conversions, half of it is F's
        seconds = [around(s, best[s][0]) + between(s, sent, best[s][0].shape[-1]) for s in stages]
        return np.stack(seconds), np.stack([around(s, best[s][1]) for s in stages])


def ramp_of(c: Configuration, chain: Chain) -> Ramp | None:
    """Return the form of the ramp that bounds it: the one that is longest where a layer takes least; None where it is a
    part of a device's whole pass."""
    forms = [form for form in c.ramps if min(form) < c.ramp or max(form) > c.ramp]
    return max(forms, key=lambda form: chain.least(form)[1], default=None)


def added_of(
    c: Configuration, stages: Sequence[StageKind], chain: Chain, most: int, part: float = 1.0
) -> Numbers | None:
    """Return what each device adds to a step at least, by its layers: [stages, layers]; None where that is a part of
    its seconds alone. A micro-batch is `part` of what the chain counts."""
    form = ramp_of(c, chain)
    if form is None:
        return None
    counts = np.arange(most + 1, dtype=np.float64)
    head, layer, tail = chain.least(form)
    known: dict[StageKind, Numbers] = {}
    for stage in set(stages):
        middle = np.maximum(counts - stage.first - stage.last, 0.0)
        known[stage] = part * np.maximum(0.0, middle * layer + stage.first * head + stage.last * tail)
    return np.stack([known[stage] for stage in stages])


def adding(seconds: Numbers, ramp: float, added: Numbers | None) -> Numbers:
    """Return what devices add to a step: a part of their `seconds`, [stages, layers, states, states], or more."""
    found = ramp * seconds if ramp else np.zeros_like(seconds)  # no part of what is infinite is nothing, not nan
    return found if added is None else np.maximum(found, added[:, :, None, None])


T = TypeVar("T", np.float64, np.int64)


def around(stage: StageKind, table: NDArray[T]) -> NDArray[T]:
    """Return a table [layers, states, states] as one of a device that is handed tensors, and hands them on, in one
    state: several stages in which there is none to begin with take that in which the device ends."""
    if stage.chunks > 1 and stage.first and stage.last:
        table = table.copy()
        table[:, 0, :] = table[:, 0, :1]
    return table


def between(stage: StageKind, sent: Numbers, states: int) -> Numbers:
    """Return the seconds in which a stage is handed a micro-batch and hands it on: [states, states].

    `sent` is by state; its least counts where states are not told apart.
    """
    own = sent if states == len(sent) else np.full(states, sent.min())
    if stage.ends is not None:
        if stage.first:
            return np.broadcast_to(stage.ends * own, (states, states))
        if stage.last:
            return np.broadcast_to((stage.ends * own)[:, None], (states, states))
        apart = np.where(np.eye(states, dtype=bool), 0.0, np.inf)
        return apart + (stage.ends * own)[:, None]
    zero = np.zeros(states)
    return (zero if stage.first else own)[:, None] + (zero if stage.last else own)[None, :]
