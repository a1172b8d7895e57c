"""The stages of ZeRO as data: how parameters rest over the ranks of dp between their uses, and what that costs.

Each value of `ParameterPlacement` is one way, a stage of ZeRO (Rajbhandari et al. 2020). All that the planner knows of
a way is in its fields: the bytes at rest, the collectives of every micro-batch, those of a step, and the steps of a
plan that say so. Tables and bounds read the fields, and test no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from nnscaler.ir.graph import LogicalTensor, element_bytes, gradient_dtype
from nnscaler.layout import INVARIANT, REPLICATED, Layout, Replicated, Sharded, local_shape, without_gradient
from nnscaler.planning.cost.collectives import seconds_per_byte
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, CostModel
from nnscaler.planning.sharding.parameter_and_activation_memory import (
    OPTIMIZER_BYTES,
    ParameterMemory,
    parameter_memory,
)
from nnscaler.planning.sharding.settings_and_strategies import Setting
from nnscaler.transform.plan import DP, EP, ZERO, RestStep, Step
from nnscaler.transform.zero_sharded_parameters import sharded_at_rest

_MANY = 2**20  # elements of a shard, of which a fraction of a byte is no part


@dataclass(frozen=True, slots=True)
class PlacementCollective:
    """A collective over dp that the runtime makes beside the lines of a program, for many parameters in one bucket.

    kind       of the collective
    gradients  whether it sums gradients; otherwise it makes parameters whole
    each       whether it is made after the backward of every micro-batch; otherwise once a step
    """

    kind: Collective
    gradients: bool
    each: bool = False


class Rates(NamedTuple):
    """The least seconds per byte of gradients that are summed over dp.

    once    of a step, where parameters rest in shards if that is so
    each    of a micro-batch, likewise
    least   of a step, however the parameter rests
    """

    once: float
    each: float
    least: float


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPlacement:
    """One way in which all parameters, their gradients and optimizer states rest over dp.

    zero       the stage of ZeRO, as `zero=3` names it; 0 for none
    sharded    fields of `ParameterMemory` that rest in shards; the others rest whole on every rank of dp
    forward    collective of a micro-batch that makes a parameter whole where it is read; None for none
    backward   collective of a micro-batch that brings a gradient from there to where it rests; None for none
    moves      what moves in buckets
    steps      what a plan says
    """

    zero: int
    sharded: frozenset[str]
    forward: Collective | None
    backward: Collective | None
    moves: tuple[PlacementCollective, ...]
    steps: tuple[Step, ...]

    @property
    def each(self) -> tuple[Collective, ...]:
        """The collectives of every micro-batch where parameters are read."""
        return tuple(kind for kind in (self.forward, self.backward) if kind is not None)

    @property
    def arrives(self) -> bool:
        """Say if gradients rest in shards, and all of a backward are whole until it ends."""
        return any(move.each for move in self.moves)

    @property
    def moments(self) -> tuple[bool, ...]:
        """The moments at which a rank may hold most: False when a backward begins, True when one ends.

        Then the activations of its micro-batch are gone, and its gradients are whole.
        """
        return (False, True) if self.arrives else (False,)

    def divides(self, tensor: LogicalTensor) -> bool:
        """Return whether a parameter rests in shards: between steps only those with an optimizer do."""
        return bool(self.sharded) and (tensor.needs_grad or "parameters" in self.sharded)

    def rates(self, cost: CostModel, ranks: AxisPlace, micro_batches: int, values: float) -> Rates:
        """Return the least seconds in which buckets bring a byte of gradients that are summed over dp to where it
        rests, with its `values` bytes of the parameter."""
        once, each = (self._per_byte(cost, ranks, values, often) for often in (False, True))
        ways = (self, WHOLE) if self.moves else ()  # a parameter that cannot be cut is moved as where all rest whole
        whole = (w._per_byte(cost, ranks, values, False) for w in ways)
        often = (micro_batches * w._per_byte(cost, ranks, values, True) for w in ways)
        return Rates(once, each, min((a + b for a, b in zip(whole, often, strict=True)), default=0.0))

    def _per_byte(self, cost: CostModel, ranks: AxisPlace, values: float, each: bool) -> float:
        """Return the seconds of a byte in the moves of every micro-batch, or in those of a step."""
        return sum(
            seconds_per_byte(cost, ranks, move.kind) * (1.0 if move.gradients else values)
            for move in self.moves
            if move.each == each
        )

    def let_go(self, tensor: LogicalTensor) -> bool:
        """Return whether a micro-batch lets go of a parameter that it has gathered, and gathers it again in backward:
        not of one with a single dim."""
        return self.forward is not None and len(tensor.shape) > 1

    def least_seconds(
        self, cost: CostModel, ranks: AxisPlace, tensor: LogicalTensor, tp: int, read_back: bool
    ) -> float:
        """Return the least seconds of a micro-batch in which a parameter is gathered and its gradient is scattered,
        whichever of its dims tp splits. `read_back`: backward reads it."""
        again = self.forward if read_back and self.let_go(tensor) else None
        kinds = [k for k in (self.forward, again, self.backward if tensor.needs_grad else None) if k is not None]
        whole, each = tensor.elements, element_bytes(tensor.dtype)
        sizes = {whole, *(whole // size * -(-size // tp) for size in tensor.shape if size)}
        return min(sum(cost.collective(kind, elements * each, ranks) for kind in kinds) for elements in sizes)

    def over(self, ranks: int, experts: int = 1) -> AtRest:
        """Return this way for `ranks` ranks that share the batch, of which `experts` divide the experts."""
        return AtRest(self, ranks if self.sharded else 1, experts)

    def memory(self, tensor: LogicalTensor, whole: int, shard: int, optimizer: float) -> ParameterMemory:
        """Return the memory of a parameter with so many elements as it is read, and in a shard of it.

        `optimizer`: bytes that the optimizer keeps of an element.
        """
        return parameter_memory(
            shard if "parameters" in self.sharded else whole,
            tensor.dtype,
            tensor.needs_grad,
            rest=shard if "optimizer" in self.sharded else whole,
            master=tensor.master,
            divided="gradients" in self.sharded,
            optimizer=optimizer,
        )

    def arriving(self, tensor: LogicalTensor, whole: int) -> int:
        """Return the bytes of a gradient of so many elements that is whole when a backward ends, beside its shard."""
        return whole * element_bytes(gradient_dtype(tensor.dtype)) if self.arrives and tensor.needs_grad else 0


_GATHER, _SCATTER = PlacementCollective("all_gather", False), PlacementCollective("reduce_scatter", True)

WHOLE = ParameterPlacement(0, frozenset(), None, None, (PlacementCollective("all_reduce", True),), ())
ZERO_1 = ParameterPlacement(1, frozenset(("optimizer",)), None, None, (_GATHER, _SCATTER), (RestStep(("*",), zero=1),))
ZERO_2 = ParameterPlacement(
    2,
    frozenset(("gradients", "optimizer")),
    None,
    None,
    (_GATHER, replace(_SCATTER, each=True)),
    (RestStep(("*",), zero=2),),
)
ZERO_3 = ParameterPlacement(
    ZERO,
    frozenset(("parameters", "gradients", "optimizer")),
    "all_gather",
    "reduce_scatter",
    (),
    (RestStep(("*",)),),
)
PLACEMENTS = (WHOLE, ZERO_1, ZERO_2, ZERO_3)  # that are searched


@dataclass(frozen=True, slots=True)
class AtRest:
    """A way for parameters to rest.

    ranks     of dp and ep together, over which they rest in shards; 1 where nothing does
    experts   ranks of ep, each of which has a part of the experts
    """

    placement: ParameterPlacement = WHOLE
    ranks: int = 1
    experts: int = 1

    def shrinks(self, parameters: Iterable[LogicalTensor], optimizer: float, late: bool = False) -> float:
        """Return how many times fewer bytes of these parameters rest on a rank, at most, than where all rests whole.

        `late` counts their whole gradients when a backward ends, too.
        """
        found, whole = 1.0, self.ranks * _MANY
        for tensor in parameters:
            if self.ranks > 1 and self.placement.divides(tensor):
                held = self.placement.memory(tensor, whole, _MANY, optimizer).total
                held += self.placement.arriving(tensor, whole) if late else 0
                found = max(found, WHOLE.memory(tensor, whole, whole, optimizer).total / held)
        return found * self.experts  # where there is nothing but experts


AT_REST_WHOLE = AtRest()


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter on one rank.

    forward    seconds of a micro-batch to gather it
    backward   seconds of a micro-batch to sum and scatter its gradient
    once       seconds of a step in which it and its gradient go between where they rest and where they are read
    resting    bytes at rest, with its gradient and optimizer states
    again      seconds of a micro-batch to gather it once more, where backward reads it
    kept       bytes that a micro-batch keeps of it for backward, where that reads it
    gathered   bytes of the whole, which are there while it is read
    arriving   bytes of its whole gradient when a backward ends, where that rests in shards
    summed     by axis, bytes of its gradient that are added up over it at the end of a step
    """

    forward: float
    backward: float
    once: float
    resting: float
    again: float
    kept: float
    gathered: float
    arriving: float
    summed: Mapping[str, float]


def leaf_of(tensor: LogicalTensor, need: Layout) -> Layout:
    """Return the leaf of a parameter that one place alone reads with layout `need`.

    Shards rest as shards, and sums of gradients wait for the end of the step.
    """
    leaf = tuple(s if isinstance(s, Sharded | Replicated) else INVARIANT for s in need[:-1])
    last = REPLICATED if isinstance(need[-1], Replicated) else INVARIANT
    return (*leaf, last) if tensor.needs_grad else without_gradient((*leaf, last))


def placed(
    tensor: LogicalTensor,
    leaf: Layout,
    setting: Setting,
    rests: AtRest,
    cost: CostModel,
    optimizer: float = OPTIMIZER_BYTES,
) -> PlacedParameter:
    """Return what a parameter costs whose leaf lies so. One that cannot be cut over dp rests whole."""
    whole = tuple(state if isinstance(state, Sharded) else INVARIANT for state in leaf)
    count, inner = _resting_on(leaf, setting, rests)
    divided = count > 1 and rests.placement.divides(tensor)
    found = _cut(tensor, whole, setting, count) if divided else None
    if found is None:
        placement, elements = WHOLE, prod(setting.local(whole, tensor.shape))
        shard = elements
    else:
        placement, (elements, shard) = rests.placement, found
    size, gradient = (elements * element_bytes(dtype) for dtype in (tensor.dtype, gradient_dtype(tensor.dtype)))
    ranks = AxisPlace(count, inner)
    over = _deferred(tensor, leaf, setting)
    moved = cost.overheads.moved
    forward = 0.0 if placement.forward is None else cost.collective(placement.forward, size, ranks) + moved
    backward = once = 0.0
    if tensor.needs_grad and placement.backward is not None:
        backward = cost.collective(placement.backward, size, ranks) + moved
    for move in placement.moves if found is not None else ():
        if DP in over or EP in over or not move.gradients:
            seconds = seconds_per_byte(cost, ranks, move.kind) * (gradient if move.gradients else size) + moved
            backward, once = (backward + seconds, once) if move.each else (backward, once + seconds)
    summed = float(shard * element_bytes(gradient_dtype(tensor.dtype)))
    return PlacedParameter(
        forward,
        backward,
        once,
        float(placement.memory(tensor, elements, shard, optimizer).total),
        forward if placement.let_go(tensor) else 0.0,
        0.0 if placement.forward is None or placement.let_go(tensor) else float(size),
        0.0 if placement.forward is None else float(size),
        float(placement.arriving(tensor, elements)),
        {name: summed for name in over if name not in (DP, EP) or found is None},
    )


def _resting_on(leaf: Layout, setting: Setting, rests: AtRest) -> tuple[int, int]:
    """Return over how many ranks a parameter rests in shards, and how far apart they are: experts over dp alone."""
    places = setting.places
    if rests.experts == 1:
        return rests.ranks, places[DP].inner
    expert = isinstance(leaf[[name for name, _ in setting.axes].index(EP)], Sharded)
    return (rests.ranks // rests.experts, places[DP].inner) if expert else (rests.ranks, places[EP].inner)


def _cut(tensor: LogicalTensor, whole: Layout, setting: Setting, ranks: int) -> tuple[int, int] | None:
    """Return the elements of a parameter as it is read, and of its shard over `ranks` ranks of dp; None where it cannot
    be cut."""
    axis = [name for name, _ in setting.axes].index(DP)
    sizes = (*setting.sizes[:axis], ranks, *setting.sizes[axis + 1 :])
    layout = sharded_at_rest(whole, axis, sizes, tensor.shape)
    if layout == whole:
        return None
    return prod(local_shape(whole, sizes, tensor.shape)), prod(local_shape(layout, sizes, tensor.shape))


def _deferred(tensor: LogicalTensor, leaf: Layout, setting: Setting) -> tuple[str, ...]:
    """Return the axes over which the gradient of a leaf is a partial sum until the end of a step."""
    pairs = zip(setting.axes[:-1], leaf[:-1], strict=True)
    return tuple(name for (name, _), state in pairs if tensor.needs_grad and isinstance(state, Replicated))
