"""How large the shard of an identifier is, and where it begins: numbers, or expressions of a rank's place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from op_registry.call import AxisShard
from op_registry.expression import Expression, by_index, index
from op_registry.spec import Refusal


def local_size(total: int, axes: Sequence[AxisShard]) -> int | Expression:
    """Return the size of one rank's part of `total`: a multiple of the size of an identifier that these axes split.

    Raises `Refusal` where it does not divide.
    """
    axes = [a for a in axes if a.parts > 1]
    uneven = next((a for a in axes if a.sizes), None)
    if uneven is None:
        parts = prod(a.parts for a in axes)
        if total % parts:
            raise Refusal(f"{total} does not divide by {parts}")
        return total // parts
    whole = sum(uneven.sizes) * uneven.outer
    if len(axes) > 1:
        raise Refusal(f"{total} is split by a second axis beside the unequal sizes {uneven.sizes}")
    if len(uneven.sizes) != uneven.parts or total % whole:
        raise Refusal(f"{total} does not divide into the sizes {uneven.sizes}")
    times = total // whole * uneven.outer
    return by_index(uneven.axis, [size * times for size in uneven.sizes])


def block_start(identifier: str, size: int, axes: Sequence[AxisShard]) -> Expression:
    """Return the first entry of the shard of an identifier of `size`, split into contiguous blocks by one axis.

    Raises `Refusal` when the shard is no single block.
    """
    if len(axes) != 1 or not axes[0].contiguous:
        raise Refusal(
            f"`{identifier}` can only be split into contiguous blocks by one axis; drop other axes, outer or sections"
        )
    (only,) = axes
    if only.sizes:
        return by_index(only.axis, [0, *accumulate(only.sizes[:-1])])
    return index(only.axis) * (size // only.parts)
