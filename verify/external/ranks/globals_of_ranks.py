"""Keep for each rank what Python and torch keep once per process, while ranks take turns."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from nnscaler.is_user_file import is_users
from nnscaler.random_generators import States, set_states, states
from verify.external.ranks.torch_private import rank_attributes

VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankState:
    """State of a process as one rank left it: random numbers, default dtype, variables, tables of torch, and what the
    names of the user's modules are bound to, such as the process groups that a library of his keeps in one."""

    random: States
    dtype: torch.dtype
    variables: tuple[str | None, ...]
    attributes: tuple[tuple[Any, str, Any, Any], ...]  # owner, name, value, and a copy of what is in it
    names: tuple[tuple[dict[str, Any], dict[str, Any]], ...]  # of a module, and a copy


def environment_of(rank: int, ranks: int) -> tuple[str, ...]:
    """Return the values of VARIABLES that a launcher on one machine sets for a rank."""
    return str(rank), str(rank), "0", str(ranks), str(ranks)


def save_state(earlier: RankState | None = None) -> RankState:
    """Return the state of this process now; of the modules that are in an earlier one, for there are thousands."""
    spaces = _of_users() if earlier is None else [space for space, _ in earlier.names]
    return RankState(
        states(),
        torch.get_default_dtype(),
        tuple(os.environ.get(name) for name in VARIABLES),
        tuple((owner, name, getattr(owner, name), _content(getattr(owner, name))) for owner, name in rank_attributes()),
        tuple((space, dict(space)) for space in spaces),
    )


def load_state(state: RankState) -> None:
    """Put this process into the state that `save_state` returned."""
    set_states(state.random)
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

    for space, names in state.names:
        if len(space) != len(names) or not all(map(is_, space.values(), names.values())):
            for name in [name for name in space if name not in names]:
                del space[name]
            space.update(names)


def empty_caches() -> None:
    """Empty what functools keeps of the results of functions in the user's modules, as in a process that has begun:
    that there is no process group, say, which a run of the plain model has asked."""
    for space in _of_users():
        for value in list(space.values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _of_users() -> list[dict[str, Any]]:
    modules = list(sys.modules.values())
    return [vars(module) for module in modules if is_users(getattr(module, "__file__", None))]


def _content(value: Any) -> dict[Any, Any] | None:
    """Return a copy of what is in a table or a plain object; None for what has no contents to change."""
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dataclass_fields__") else None
