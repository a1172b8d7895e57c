"""Walk and map nested values of a user's: batches, samples, and what models return.

A container is a mapping, a named tuple, a tuple or list, or a dataclass, whoever defined it: torch's own pytrees take a
mapping of a library and a dataclass for leaves, and miss the tensors and numbers in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def items_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container has, by key, field or position, in order; None for any other value."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return None


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a container like this one with these items, which are as many as its own; it stays as it is."""
    if isinstance(value, Mapping):
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return dict(items)
        made: Any = copy.copy(value)
        for name, held in list(getattr(made, "__dict__", {}).items()):
            if isinstance(held, dict | list):  # a mapping of a library may keep its items in one, which a copy shares
                object.__setattr__(made, name, copy.copy(held))
        for key, item in items.items():
            made[key] = item
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items.values())
    if isinstance(value, tuple | list):
        return type(value)(items.values())
    made = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(made, name, item)  # it may be frozen
    return made


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no container in a nested value, with its place in it: `['x'][0].mask`."""
    items = items_of(value)
    if items is None:
        yield path, value
        return
    by_position = isinstance(value, Mapping | list) or (not hasattr(value, "_fields") and isinstance(value, tuple))
    for key, item in items.items():
        yield from leaves_of(item, path + (f"[{key!r}]" if by_position else f".{key}"))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value in the order in which they stand."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def map_tensors(value: Any, function: Callable[[Tensor], Any], anew: bool = False) -> Any:
    """Return the nested value with `function` of each tensor in its place, as `map_kind` does."""
    return map_kind(value, Tensor, function, anew)


def map_kind(value: Any, kind: type[T], function: Callable[[T], Any], anew: bool = False) -> Any:
    """Return the nested value with `function` of each object of a kind in its place.

    A container in which that changes nothing stays the same object; `anew`: every one is another, which its user may
    change.
    """
    if isinstance(value, kind):
        return function(value)
    items = items_of(value)
    if items is None:
        return value
    made = {key: map_kind(item, kind, function, anew) for key, item in items.items()}
    same = not anew and all(made[key] is item for key, item in items.items())
    return value if same else with_items(value, made)
