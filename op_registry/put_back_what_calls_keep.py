"""Put back what a user's function keeps between calls: a trace runs it on tensors without values.

A table that is made on the first call would else hold such tensors from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any

from op_registry.numbers_in_user_code import functions_of, names_in, reached_from

_DEPTH = 3  # of containers and objects within each other
_UNCHANGING = (str, bytes, int, float, complex, tuple, frozenset, ModuleType)

Undo = Callable[[], object]


@contextmanager
def nothing_kept(target: Any) -> Iterator[None]:
    """While open, an operator may keep what it likes; then all is put back that its functions and those that they call
    name around them: variables, what lists, sets, mappings and objects hold, and what `functools.cache` has."""
    undo: list[Undo] = []
    for function in reached_from(functions_of(target)):
        around = getattr(function, "__globals__", {})
        for name in {*names_in(function.__code__)} & {*around}:
            undo += [_binding(around, name), *_contents(around[name], _DEPTH)]
        for cell in getattr(function, "__closure__", None) or ():
            undo += _cell(cell)
        undo += _contents(vars(function), 1)
    try:
        yield
    finally:
        for step in undo:
            step()


def _binding(around: dict[str, Any], name: str) -> Undo:
    value = around[name]
    return lambda: around.__setitem__(name, value)


def _cell(cell: CellType) -> list[Undo]:
    try:
        value = cell.cell_contents
    except ValueError:  # not bound yet
        return []
    return [lambda: setattr(cell, "cell_contents", value), *_contents(value, _DEPTH)]


def _contents(value: Any, depth: int) -> Iterator[Undo]:
    """Yield what puts back the things that a value holds now."""
    if not depth or value is None or isinstance(value, _UNCHANGING) or hasattr(value, "dtype"):
        return
    if hasattr(value, "cache_info") and hasattr(value, "cache_clear"):
        size = value.cache_info().currsize
        yield lambda: value.cache_clear() if value.cache_info().currsize != size else None
        return
    inside: Any = ()
    if isinstance(value, dict):
        inside, known = value.values(), dict(value)
        yield value.clear
        yield lambda: value.update(known)
    elif isinstance(value, list):
        inside, listed = value, list(value)
        yield lambda: value.__setitem__(slice(None), listed)
    elif isinstance(value, set):
        members = set(value)
        yield value.clear
        yield lambda: value.update(members)
    elif isinstance(value, type):
        attributes = dict(vars(value))
        yield lambda: _put_back(value, attributes)
    elif hasattr(value, "__dict__"):
        inside = (vars(value),)
    for part in inside:
        yield from _contents(part, depth - 1)


def _put_back(cls: type, attributes: dict[str, Any]) -> None:
    """Give a class the attributes that it had, and no others."""
    for name, value in [*vars(cls).items()]:
        if name not in attributes:
            delattr(cls, name)
        elif value is not attributes[name]:
            setattr(cls, name, attributes[name])
