"""How parameters rest over the ranks of dp between their uses, as data, and what that costs.

Each value of `ParameterPlacement` is one way, a stage of ZeRO (Rajbhandari et al. 2020). All that the planner knows of
a way is in its fields: the bytes at rest, the collectives of every micro-batch, those at the end of a step, and the
steps of a plan that say so. Tables and bounds read the fields, and test no stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from nnscaler.ir.graph import LogicalTensor, element_bytes, gradient_dtype
from nnscaler.ir.layout import (
    INVARIANT,
    REPLICATED,
    Layout,
    Replicated,
    Sharded,
    local_shape,
    without_gradient,
)
from nnscaler.planning.cost.model import AxisPlace, Collective, CostModel
from nnscaler.planning.sharding.memory import OPTIMIZER_BYTES, ParameterMemory, parameter_memory
from nnscaler.planning.sharding.problem_config import Setting
from nnscaler.transform.plan import DP, ZERO, RestStep, Step
from nnscaler.transform.zero import sharded_at_rest

SIZES = tuple(2.0**n for n in range(10, 42, 2))  # bytes; of the largest, latency is no part


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPlacement:
    """One way in which all parameters, their gradients and optimizer states rest over dp.

    zero       the stage of ZeRO, as `zero=3` names it; 0 for none
    sharded    fields of `ParameterMemory` that rest in shards; the others rest whole on every rank of dp
    forward    collective of a micro-batch that makes a parameter whole; None where it rests as it is read
    backward   collective of a micro-batch that brings a gradient to where it rests; None for none
    once       collective of a step that brings gradients, or new values, to all ranks; None for none
    steps      what a plan says
    """

    zero: int
    sharded: frozenset[str]
    forward: Collective | None
    backward: Collective | None
    once: Collective | None
    steps: tuple[Step, ...]

    @property
    def each(self) -> tuple[Collective, ...]:
        """The collectives of every micro-batch."""
        return tuple(kind for kind in (self.forward, self.backward) if kind is not None)

    def seconds_per_byte(self, cost: CostModel, ranks: AxisPlace) -> float:
        """Return the least seconds of a micro-batch per byte of a parameter that is gathered and whose gradient is
        scattered.

        Measured links may be fastest at some size in the middle.
        """
        return sum(min(cost.collective(kind, size, ranks) / size for size in SIZES) for kind in self.each)

    def over(self, ranks: int) -> AtRest:
        """Return this way for `ranks` ranks of dp."""
        return AtRest(self, ranks if self.sharded else 1)

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


WHOLE = ParameterPlacement(0, frozenset(), None, None, "all_reduce", ())
ZERO_3 = ParameterPlacement(
    ZERO,
    frozenset(("parameters", "gradients", "optimizer")),
    "all_gather",
    "reduce_scatter",
    None,
    (RestStep(("*",)),),
)
PLACEMENTS = (WHOLE, ZERO_3)  # that are searched
BY_ZERO = {placement.zero: placement for placement in PLACEMENTS}


@dataclass(frozen=True, slots=True)
class AtRest:
    """A way for parameters to rest, and over how many ranks of dp: 1 where nothing rests in shards."""

    placement: ParameterPlacement = WHOLE
    ranks: int = 1

    @property
    def shrinks(self) -> float:
        """How many times fewer bytes rest on a rank, at most, than where all rests whole."""
        found = 1.0
        for dtype in ("float32", "bfloat16"):
            memory = parameter_memory(1, dtype)
            shared = sum(getattr(memory, name) for name in self.placement.sharded)
            found = max(found, self.ranks * memory.total / (self.ranks * (memory.total - shared) + shared))
        return found


AT_REST_WHOLE = AtRest()


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """One parameter on one rank.

    resting    bytes at rest, with its gradient and optimizer states
    gathered   bytes that a micro-batch holds in addition while the parameter is whole
    forward    seconds of a micro-batch to gather it
    backward   seconds of a micro-batch to sum and scatter its gradient
    summed     by axis, bytes of its gradient that are added up over it at the end of a step
    """

    resting: float
    gathered: float
    forward: float
    backward: float
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
    found = _cut(tensor, whole, setting, rests.ranks) if rests.ranks > 1 else None
    if found is None:
        placement, elements = WHOLE, prod(setting.local(whole, tensor.shape))
        shard = elements
    else:
        placement, (elements, shard) = rests.placement, found
    size = elements * element_bytes(tensor.dtype)
    ranks = AxisPlace(rests.ranks, setting.places[DP].inner)
    forward = 0.0 if placement.forward is None else cost.collective(placement.forward, size, ranks)
    backward = 0.0
    if tensor.needs_grad and placement.backward is not None:
        backward = cost.collective(placement.backward, size, ranks)
    return PlacedParameter(
        float(placement.memory(tensor, elements, shard, optimizer).total),
        0.0 if placement.forward is None else float(size),
        forward,
        backward,
        _summed(tensor, leaf, setting, placement, shard if "gradients" in placement.sharded else elements),
    )


def _cut(tensor: LogicalTensor, whole: Layout, setting: Setting, ranks: int) -> tuple[int, int] | None:
    """Return the elements of a parameter as it is read, and of its shard over `ranks` ranks of dp; None where it cannot
    be cut."""
    axis = [name for name, _ in setting.axes].index(DP)
    sizes = (*setting.sizes[:axis], ranks, *setting.sizes[axis + 1 :])
    layout = sharded_at_rest(whole, axis, sizes, tensor.shape)
    if layout == whole:
        return None
    return prod(local_shape(whole, sizes, tensor.shape)), prod(local_shape(layout, sizes, tensor.shape))


def _summed(
    tensor: LogicalTensor, leaf: Layout, setting: Setting, placement: ParameterPlacement, elements: int
) -> dict[str, float]:
    """Return, by axis, the bytes of a gradient of so many elements that are added up over it at the end of a step."""
    if not tensor.needs_grad:
        return {}
    size = float(element_bytes(gradient_dtype(tensor.dtype)) * elements)
    pairs = zip(setting.axes[:-1], leaf[:-1], strict=True)
    over = (name for (name, _), state in pairs if isinstance(state, Replicated))
    return {name: size for name in over if name != DP or placement.once is not None}
