"""Let FSDP2's mixed precision be float64 in a run in float64.

A policy names the dtypes of parameters and of reductions, mostly bfloat16 and float32, and casts to them below the
functions that an exact run watches. Such a run compares a program up to the rounding of float64, so that there a policy
says nothing; in other dtypes it is what its author wrote.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


@cache
def register_policies() -> None:
    """Make policies say nothing while torch's default dtype is float64. It stays for the life of the process."""
    for name in _FIELDS:
        setattr(MixedPrecisionPolicy, name, _Dtype(name))


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
