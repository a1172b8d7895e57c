"""The cost of a parameter that rests in shards over dp (ZeRO-3): less memory, for a gather before it is read and a
scattered sum of its gradient, in every micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nnscaler.ir.graph import LogicalTensor, element_bytes
from nnscaler.ir.layout import INVARIANT, Layout, Sharded, local_shape
from nnscaler.planning.cost.model import AxisPlace, Collective, CostModel
from nnscaler.planning.sharding.memory import parameter_memory
from nnscaler.planning.sharding.problem_config import Setting
from nnscaler.transform.zero3 import sharded_at_rest

SIZES = tuple(2.0**n for n in range(10, 42, 2))  # bytes; of the largest, latency is no part


@dataclass(frozen=True, slots=True)
class Resting:
    """A parameter that rests in shards.

    bytes      at rest, with its gradient and optimizer states
    elements   of the shard
    gathered   bytes of the gathered parameter
    forward    seconds to gather it
    backward   seconds to sum and scatter its gradient
    """

    bytes: float
    elements: int
    gathered: float
    forward: float
    backward: float


def resting_of(
    tensor: LogicalTensor, leaf: Layout, setting: Setting, shards: AxisPlace, cost: CostModel
) -> Resting | None:
    """Return the cost of a parameter whose leaf would lie so, over `shards` of the axis dp; None where it cannot be
    cut."""
    names = [name for name, _ in setting.axes]
    axis = names.index("dp")
    sizes = (*setting.sizes[:axis], shards.size, *setting.sizes[axis + 1 :])
    whole = tuple(state if isinstance(state, Sharded) else INVARIANT for state in leaf)
    layout = sharded_at_rest(whole, axis, sizes, tensor.shape)
    if layout == whole:
        return None
    elements = prod(local_shape(layout, sizes, tensor.shape))
    gathered = prod(local_shape(whole, sizes, tensor.shape)) * element_bytes(tensor.dtype)
    held = parameter_memory(elements, tensor.dtype, trainable=tensor.needs_grad)
    back = cost.collective("reduce_scatter", gathered, shards) if tensor.needs_grad else 0.0
    return Resting(float(held.total), elements, float(gathered), cost.collective("all_gather", gathered, shards), back)


def gathering_rate(cost: CostModel, shards: AxisPlace) -> float:
    """Return the least seconds per byte of a parameter that is gathered, and whose gradient is summed and scattered.

    Measured links may be fastest at some size in the middle.
    """
    kinds: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    return sum(min(cost.collective(kind, size, shards) / size for size in SIZES) for kind in kinds)
