"""Keep for each rank the global state that Python and torch have once per process, while ranks take turns."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nnscaler.global_random_generators import States, set_states, states
from nnscaler.is_user_file import is_users
from verify.external.ranks.torch_private import rank_attributes

_TABLES = (dict, list, set, defaultdict, OrderedDict, Counter, deque, np.ndarray)
_LARGEST = 1024  # elements of a table: larger ones hold data, which no rank changes
VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class BoundNames:
    """The names of a module, or of a class that it defines, with the values that they are bound to.

    owner   the module's `vars`, or the class
    bound   a copy of what was in it
    tables  those that its names are bound to: dicts, lists, deques, sets, arrays, and attributes of the user's objects
    """

    owner: dict[str, Any] | type
    bound: Mapping[str, Any]
    tables: tuple[Any, ...]


@dataclass(frozen=True)
class RankState:
    """State of a process as one rank left it: random numbers, default dtype, variables, tables of torch, and what the
    names of the user's modules and classes are bound to, such as the process groups that a library of his keeps in
    one, or in a dict."""

    random: States
    dtype: torch.dtype
    variables: tuple[str | None, ...]
    attributes: tuple[tuple[Any, str, Any, Any], ...]  # owner, name, value, and a copy of what is in it
    names: tuple[BoundNames, ...]
    tables: tuple[tuple[Any, Any], ...]  # that names lead to, and a copy of each


def environment_of(rank: int, ranks: int) -> tuple[str, ...]:
    """Return the values of VARIABLES that a launcher on one machine sets for a rank."""
    return str(rank), str(rank), "0", str(ranks), str(ranks)


def save_state(earlier: RankState | None = None) -> RankState:
    """Return the state of this process now; of the modules that are in an earlier one, for there are thousands."""
    names = _of_users() if earlier is None else tuple(map(_now, earlier.names))
    copies = {} if earlier is None else {id(table): copy for table, copy in earlier.tables}
    return RankState(
        states(),
        torch.get_default_dtype(),
        tuple(os.environ.get(name) for name in VARIABLES),
        tuple((owner, name, getattr(owner, name), _content(getattr(owner, name))) for owner, name in rank_attributes()),
        names,
        tuple((table, _copied(table, copies.get(id(table)))) for table in _tables(names)),
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
    for names in state.names:
        if not _same(_space(names.owner), names.bound):
            _bind(names.owner, names.bound)
    for table, copy in state.tables:
        if not _same(table, copy):
            _fill(table, copy)


def tensors_of_all(state: RankState) -> tuple[tuple[str, Tensor, int], ...]:
    """Return the tensors that names and tables lead to, each with where it is and how often it was changed in place:
    what is in them is no rank's own."""
    places: list[tuple[str, Mapping[Any, Any]]] = []
    for names in state.names:
        owner = names.owner.__name__ if isinstance(names.owner, type) else str(names.owner.get("__name__"))
        places.append((owner.rpartition(".")[2], names.bound))
    for _, table in state.tables:
        places.append(("a table", _inside(table)))
    found = ((f"{name} of {owner}", value) for owner, inside in places for name, value in inside.items())
    tensors = ((place, value) for place, value in found if isinstance(value, Tensor) and not value.is_inference())
    return tuple((place, tensor, tensor._version) for place, tensor in tensors)


def with_own_caches(state: RankState) -> RankState:
    """Return the state for one rank, for which functools keeps the results of the user's functions anew: what they
    return, such as the number of a rank or its group, is that of the rank which has called them first."""
    own: dict[int, Any] = {}

    def anew(value: Any) -> Any:
        if isinstance(value, staticmethod | classmethod):
            inner = anew(value.__func__)
            return value if inner is value.__func__ else type(value)(inner)
        if not isinstance(value, functools._lru_cache_wrapper):
            return value
        if id(value) not in own:
            own[id(value)] = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        return own[id(value)]

    names = (replace(one, bound={name: anew(value) for name, value in one.bound.items()}) for one in state.names)
    return replace(state, names=tuple(names))


def empty_caches() -> None:
    """Empty what functools keeps of the results of functions in the user's modules, as in a process that has begun:
    that there is no process group, say, which a run of the plain model has asked."""
    for value in (value for names in _of_users() for value in names.bound.values()):
        inner = getattr(value, "__func__", value)
        if isinstance(inner, functools._lru_cache_wrapper):
            inner.cache_clear()


def _of_users() -> tuple[BoundNames, ...]:
    """Return the names of the user's modules, and of the classes that these define."""

    def owners() -> Iterator[dict[str, Any] | type]:
        for module in list(sys.modules.values()):
            if is_users(getattr(module, "__file__", None)):
                space = vars(module)
                yield space
                yield from (v for v in space.values() if isinstance(v, type) and v.__module__ == space.get("__name__"))

    found = {id(owner): owner for owner in owners()}
    return tuple(_bound_names(owner) for owner in found.values())


def _space(owner: dict[str, Any] | type) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, type) else owner


def _bound_names(owner: dict[str, Any] | type) -> BoundNames:
    bound = dict(_space(owner))
    tables = (_table_of(value) for name, value in bound.items() if not name.startswith("__"))
    return BoundNames(owner, bound, tuple(table for table in tables if table is not None))


def _now(names: BoundNames) -> BoundNames:
    return names if _same(_space(names.owner), names.bound) else _bound_names(names.owner)


def _bind(owner: dict[str, Any] | type, bound: Mapping[str, Any]) -> None:
    if isinstance(owner, dict):
        for name in [name for name in owner if name not in bound]:
            del owner[name]
        owner.update(bound)
        return
    for name in [name for name in vars(owner) if name not in bound]:
        type.__delattr__(owner, name)
    for name, value in bound.items():
        if vars(owner).get(name, bound) is not value:
            type.__setattr__(owner, name, value)


# Tables: a program fills them after they are bound to a name, or to a key of another one.


def _table_of(value: Any) -> Any:
    """Return a table whose contents are a rank's own, or the attributes of an object of a class of the user's; None for
    any other value. Modules are copied for each rank; a run in which shared tensors change is told (`tensors_of_all`).
    """
    kind = type(value)
    if kind in _TABLES:
        return value
    own = kind is SimpleNamespace or _is_users_module(kind.__module__)
    return getattr(value, "__dict__", None) if own and not isinstance(value, type | nn.Module | Tensor) else None


def _is_users_module(name: str) -> bool:
    return _is_users_file(getattr(sys.modules.get(name), "__file__", None))


_is_users_file = functools.cache(is_users)


def _tables(names: Iterable[BoundNames]) -> list[Any]:
    """Return the tables that names lead to, also through other tables, each once."""
    found: dict[int, Any] = {}
    waiting = [table for one in names for table in one.tables]
    while waiting:
        table = waiting.pop()
        if id(table) not in found and (table.size if isinstance(table, np.ndarray) else len(table)) <= _LARGEST:
            found[id(table)] = table
            waiting += [inner for value in _inside(table).values() if (inner := _table_of(value)) is not None]
    return list(found.values())


def _inside(table: Any) -> Mapping[Any, Any]:
    """Return what is in a table, by its keys or numbers; the numbers of an array are no objects."""
    if isinstance(table, dict):
        return table
    return {} if isinstance(table, np.ndarray) else dict(enumerate(table))


def _same(table: Any, copy: Any) -> bool:
    """Return whether a table holds what a copy of it holds: the same objects, in the same order."""
    if isinstance(table, np.ndarray):
        return bool(table.shape == copy.shape and table.tobytes() == copy.tobytes())
    if len(table) != len(copy):
        return False
    if isinstance(table, set):
        return bool(table == copy)
    if isinstance(table, list | deque):
        return all(map(is_, table, copy))
    return all(map(is_, table.values(), copy.values())) and all(map(is_, table, copy))


def _copied(table: Any, earlier: Any) -> Any:
    """Return a copy of a table; the earlier one where nothing was changed since."""
    kind = next(kind for kind in (dict, list, deque, set, np.ndarray) if isinstance(table, kind))
    if type(earlier) is kind and _same(table, earlier):
        return earlier
    return table.copy() if kind is np.ndarray else kind(table)


def _fill(table: Any, copy: Any) -> None:
    if isinstance(table, np.ndarray):
        table[...] = copy
    elif isinstance(table, list):
        table[:] = copy
    elif isinstance(table, deque):
        table.clear()
        table.extend(copy)
    elif isinstance(table, set):
        table.clear()
        table.update(copy)
    else:
        if list(table) != list(copy):
            table.clear()
        for key, value in copy.items():  # a Counter would add in `update`
            table[key] = value


def _content(value: Any) -> dict[Any, Any] | None:
    """Return a copy of what is in a table or a plain object; None for what has no contents to change."""
    if isinstance(value, dict):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dataclass_fields__") else None
