"""Keep for each rank the global state that Python and torch have once per process, while ranks take turns."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch

from nnscaler.global_random_generators import States, set_states, states
from nnscaler.is_user_file import is_users
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
    methods: tuple[tuple[type, str, Any], ...]  # of the user's classes, whose results functools keeps
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
        _methods_that_cache(spaces) if earlier is None else earlier.methods,
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
    for owner, name, method in state.methods:
        if vars(owner).get(name) is not method:
            setattr(owner, name, method)
    for space, names in state.names:
        if len(space) != len(names) or not all(map(is_, space.values(), names.values())):
            for name in [name for name in space if name not in names]:
                del space[name]
            space.update(names)


def with_own_caches(state: RankState) -> RankState:
    """Return the state for one rank, for which functools keeps the results of the user's functions anew: what they
    return, such as the number of a rank or its group, is that of the rank which has called them first."""
    own: dict[int, Any] = {}

    def anew(value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            return type(value)(anew(value.__func__))
        if not isinstance(value, functools._lru_cache_wrapper):
            return value
        if id(value) not in own:
            own[id(value)] = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        return own[id(value)]

    return replace(
        state,
        methods=tuple((owner, name, anew(method)) for owner, name, method in state.methods),
        names=tuple((space, {name: anew(value) for name, value in names.items()}) for space, names in state.names),
    )


def empty_caches() -> None:
    """Empty what functools keeps of the results of functions in the user's modules, as in a process that has begun:
    that there is no process group, say, which a run of the plain model has asked."""
    spaces = _of_users()
    for value in [value for space in spaces for value in space.values()]:
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    for _, _, method in _methods_that_cache(spaces):
        getattr(method, "__func__", method).cache_clear()


def _methods_that_cache(spaces: list[dict[str, Any]]) -> tuple[tuple[type, str, Any], ...]:
    """Return the owner, name and value of what functools caches in classes that these modules define."""

    def found() -> Iterator[tuple[type, str, Any]]:
        for space in spaces:
            classes = [value for value in space.values() if isinstance(value, type)]
            for owner in (c for c in classes if c.__module__ == space.get("__name__")):
                for name, value in vars(owner).items():
                    inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                    if isinstance(inner, functools._lru_cache_wrapper):
                        yield owner, name, value

    return tuple(found())


def _of_users() -> list[dict[str, Any]]:
    modules = list(sys.modules.values())
    return [vars(module) for module in modules if is_users(getattr(module, "__file__", None))]


def _content(value: Any) -> dict[Any, Any] | None:
    """Return a copy of what is in a table or a plain object; None for what has no contents to change."""
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dataclass_fields__") else None
