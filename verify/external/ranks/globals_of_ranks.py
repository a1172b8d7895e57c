"""Keep for each rank what Python and torch keep once per process, while ranks take turns."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from verify.external.ranks.torch_private import rank_attributes

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankState:
    """State of a process as one rank left it: random numbers, default dtype, variables, and tables of torch."""

    torch_random: torch.Tensor
    python_random: tuple[Any, ...]
    numpy_random: Any
    dtype: torch.dtype
    variables: tuple[str | None, ...]
    attributes: tuple[tuple[Any, str, Any, Any], ...]  # owner, name, value, and a copy of what is in it


def environment_of(rank: int, ranks: int) -> tuple[str, ...]:
    """Return the values of VARIABLES that a launcher on one machine sets for a rank."""
    return str(rank), str(rank), "0", str(ranks), str(ranks)


def save_state() -> RankState:
    """Return the state of this process now."""
    numpy = sys.modules.get("numpy")
    return RankState(
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        torch.get_default_dtype(),
        tuple(os.environ.get(name) for name in VARIABLES),
        tuple((owner, name, getattr(owner, name), _content(getattr(owner, name))) for owner, name in rank_attributes()),
    )


def load_state(state: RankState) -> None:
    """Put this process into the state that `save_state` returned."""
    torch.set_rng_state(state.torch_random)
    random.setstate(state.python_random)
    if state.numpy_random is not None:
        sys.modules["numpy"].random.set_state(state.numpy_random)
    if torch.get_default_dtype() != state.dtype:
        torch.set_default_dtype(state.dtype)
    for name, value in zip(VARIABLES, state.variables, strict=True):
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value
    for owner, name, value, content in state.attributes:
        if getattr(owner, name) is not value:
            setattr(owner, name, value)
        if content is not None and _content(value) != content:
            inside = value if isinstance(value, dict) else vars(value)
            inside.clear()
            inside.update(content)


def _content(value: Any) -> dict[Any, Any] | None:
    """Return a copy of what is in a table or a plain object; None for what has no contents to change."""
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dataclass_fields__") else None
