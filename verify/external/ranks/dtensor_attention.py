"""Let DTensor divide attention on a CPU, as it divides attention on a GPU.

Torch dispatches `scaled_dot_product_attention` to another operator on each device, and DTensor has rules for those of
GPUs alone: a program that is right on a GPU raises on a CPU. The rules here are the same ones: everything whole, or the
batch or the heads divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from verify.external.ranks.torch_private_trace import has_sharding_rule

BATCH, HEADS = 0, 1  # dims of queries, keys, values, the output, its sums and masks
_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(BATCH), Shard(HEADS))
Placements = list[Placement | None]


@cache
def register_attention() -> None:
    """Give DTensor rules for attention on a CPU, where torch has none. They stay for the life of the process."""
    operators = torch.ops.aten
    for operator, rule in (
        (operators._scaled_dot_product_flash_attention_for_cpu.default, _forward),
        (operators._scaled_dot_product_flash_attention_for_cpu_backward.default, _backward),
    ):
        if not has_sharding_rule(operator):
            register_sharding(operator)(rule)


def _forward(*_given: Any, attn_mask: Any = None, **_named: Any) -> Sequence[tuple[Placements, Placements]]:
    """Return the placements of (output, sums) and of (query, key, value, mask)."""
    return [([one] * 2, [*[one] * 3, *_of_mask(attn_mask, one)]) for one in _choices(attn_mask)]


def _backward(*_given: Any, attn_mask: Any = None, **_named: Any) -> Sequence[tuple[Placements, Placements]]:
    """Return the placements of the three gradients, and of (gradient, query, key, value, output, sums, mask)."""
    return [([one] * 3, [*[one] * 6, *_of_mask(attn_mask, one)]) for one in _choices(attn_mask)]


def _choices(mask: Any) -> Sequence[Placement]:
    """Return the placements that the mask allows: DTensor cannot lay it out anew, for it is given by name."""
    return [one for one in _PLACEMENTS if not _divided(mask, one) or one in mask.placements]


def _of_mask(mask: Any, placement: Placement) -> Placements:
    """Return the placement of the mask: whole where it is the same for all of the dim that is divided."""
    if mask is None:
        return []
    return [placement if _divided(mask, placement) else Replicate()]


def _divided(mask: Any, placement: Placement) -> bool:
    return isinstance(placement, Shard) and mask is not None and len(mask.shape) == 4 and mask.shape[placement.dim] > 1
