"""Let a run in float64 be exact where the modes that watch torch's functions are not open.

Torch leaves them for the time of a backward pass, and with them what activation checkpointing computes again, and hooks
on gradients, such as those by which DDP compresses them: there `x.float()` would round, and dropout drop.
Mixed precision of FSDP casts below the functions that a mode sees: bfloat16 and float32, mostly. A run in float64
compares a program up to the rounding of float64, so that there a policy says nothing; in other dtypes it is what its
author wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

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
