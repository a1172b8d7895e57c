"""Put into this process, for its life, what torch lacks on a CPU and in float64.

Let DTensor divide attention on a CPU, as it divides attention on a GPU.

Torch dispatches `scaled_dot_product_attention` to another operator on each device, and DTensor has rules for those of
GPUs alone: a program that is right on a GPU raises on a CPU. The rules here are the same ones: everything whole, or the
batch or the heads divided. Within `context_parallel` the sequence is divided, and keys and values go around in a ring,
which is torch's own, with the kernel of the CPU in it.

Let a run in float64 be exact where the modes that watch torch's functions are not open.

Torch leaves them for the time of a backward pass, and with them what activation checkpointing computes again, and hooks
on gradients, such as those by which DDP compresses them: there `x.float()` would round, and dropout drop.
Mixed precision of FSDP casts below the functions that a mode sees: bfloat16 and float32, mostly. A run in float64
compares a program up to the rounding of float64, so that there a policy says nothing; in other dtypes it is what its
author wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from verify.external.ranks.torch_private_trace import attention_rings, has_sharding_rule

BATCH, HEADS, SEQUENCE = 0, 1, 2  # dims of queries, keys, values, the output, its sums and masks
_PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(BATCH), Shard(HEADS))
Placements = list[Placement | None]


_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_GRADIENTS: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@cache
def register_attention() -> None:
    """Give DTensor rules for attention on a CPU, where torch has none. They stay for the life of the process."""
    for operator, rule in ((_ATTENTION, _forward), (_GRADIENTS, _backward)):
        if not has_sharding_rule(operator):
            register_sharding(operator)(rule)
    for operator, ring in ((_ATTENTION, _ring), (_GRADIENTS, _ring_of_gradients)):
        attention_rings().custom_ops.setdefault(operator, _of_shards(ring))


# -- batch or heads divided -------------------------------------------------------------------------------------------


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


# -- the sequence divided ---------------------------------------------------------------------------------------------


def _of_shards(ring: Callable[..., Sequence[Tensor]]) -> Callable[..., tuple[DTensor, ...]]:
    """Return a handler of DTensor's dispatcher: what a function makes of each rank's own shards."""

    def handle(_operator: Any, given: Sequence[Any], named: Mapping[str, Any]) -> tuple[DTensor, ...]:
        first, options = given[0], attention_rings()._cp_options
        own = [value._local_tensor if isinstance(value, DTensor) else value for value in given]
        rounds = options.convert_to_f32
        options.convert_to_f32 = rounds and first.dtype != torch.float64  # a run in float64 rounds nothing
        try:
            made = ring(first.device_mesh.get_group(), *own, **named)
        finally:
            options.convert_to_f32 = rounds
        return tuple(DTensor.from_local(one, first.device_mesh, first.placements, run_check=False) for one in made)

    return handle


def _ring(
    group: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
) -> Sequence[Tensor]:
    """Return the output, and its sums, of a rank's queries with the keys and values of all."""
    _refuse_mask(named)
    how = {"is_causal": is_causal, "dropout_p": dropout_p, **named}
    rings, kernel = attention_rings(), _ATTENTION
    found: Sequence[Tensor] = rings._templated_ring_attention(group, SEQUENCE, kernel, query, key, value, **how)
    return found


def _ring_of_gradients(group: Any, gradient: Tensor, *saved: Tensor | float, **named: Any) -> Sequence[Tensor]:
    """Return the gradients of a rank's queries, keys and values."""
    _refuse_mask(named)
    *tensors, dropout_p, is_causal = saved
    how = {"is_causal": is_causal, "dropout_p": dropout_p, **named}
    ring = attention_rings()._templated_ring_attention_backward
    found: Sequence[Tensor] = ring(group, SEQUENCE, _GRADIENTS, gradient, "grad_out", *tensors, **how)
    return found


def _refuse_mask(named: Mapping[str, Any]) -> None:
    if named.get("attn_mask") is not None:
        raise ValueError("context_parallel takes no mask of attention")  # nor does it on a GPU


# Float64.


_POLICIES: dict[type, tuple[str, ...]] = {
    MixedPrecisionPolicy: ("param_dtype", "reduce_dtype", "output_dtype"),
    MixedPrecision: ("param_dtype", "reduce_dtype", "buffer_dtype"),
}


@cache
def exact_throughout() -> None:
    """Keep modes open in backward passes, and policies from rounding while torch's default dtype is float64. It stays
    for the life of the process."""
    for policy, fields in _POLICIES.items():
        for name in fields:
            setattr(policy, name, _Dtype(name))
    autograd: Any = torch.autograd
    asked = autograd.has_torch_function

    def overriding(tensors: Sequence[object]) -> bool:
        plain = (type(one) is Tensor or isinstance(one, nn.Parameter | DTensor) for one in tensors)
        return not all(plain) and bool(asked(tensors))

    def backward(
        this: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: Any = False, inputs: Any = None
    ) -> None:
        autograd.backward(this, gradient, retain_graph, create_graph, inputs=inputs)

    autograd.has_torch_function, Tensor.backward = overriding, backward  # type: ignore[method-assign]


class _Dtype:
    """A field of a policy: None while everything is float64, else the dtype that it was given."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, policy: object | None, owner: type) -> torch.dtype | None:
        if policy is None or torch.get_default_dtype() == torch.float64:
            return None
        found: torch.dtype | None = vars(policy).get(self._name)
        return found

    def __set__(self, policy: Any, value: torch.dtype | None) -> None:
        vars(policy)[self._name] = value
