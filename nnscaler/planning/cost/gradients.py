"""What it costs to add up the gradients of a step, which the runtime does in buckets."""

from __future__ import annotations

from nnscaler.planning.cost.model import AxisPlace, CostModel

BUCKET_BYTES = 25 * 2**20


def seconds_per_byte(cost: CostModel, ranks: AxisPlace) -> float:
    """Of gradients that are added up over an axis, in full buckets."""
    return cost.collective("all_reduce", BUCKET_BYTES, ranks) / BUCKET_BYTES
