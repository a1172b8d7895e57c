"""The cost of adding up the gradients of a step, which the runtime does in buckets."""

from __future__ import annotations

from nnscaler.planning.cost.model import AxisPlace, CostModel

BUCKET_BYTES = 25 * 2**20


def seconds_per_byte(cost: CostModel, ranks: AxisPlace) -> float:
    """Return the seconds per byte of gradients that are added up over an axis, in full buckets."""
    return cost.collective("all_reduce", BUCKET_BYTES, ranks) / BUCKET_BYTES


def summed_seconds(cost: CostModel, ranks: AxisPlace, size: float) -> float:
    """Return the seconds of adding up `size` bytes of gradients of one dtype over one group, in full buckets and a last
    one."""
    full, rest = divmod(size, BUCKET_BYTES)
    last = cost.collective("all_reduce", rest, ranks) if rest else 0.0
    return full * cost.collective("all_reduce", BUCKET_BYTES, ranks) + last
