"""Find the state that forward may change beside the attributes of modules: objects and containers that they hold,
attributes of the user's classes, and the globals that forward names."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from op_registry.numbers_in_user_code import names_in

from nnscaler.is_user_file import is_users

_DEPTH = 4  # containers and objects, one in the other
_MOST = 1000  # items of a container: larger ones hold data, and are left alone
_PLAIN = (bool, int, float, str, Tensor, type(None))
_ORDERED, _COPIED = (list, deque), (list, dict, set)
_MISSING = object()


@dataclass(frozen=True)
class Holder:
    """Something that holds values under keys.

    name   of the value under a key
    read   all that it holds now
    write  makes it hold these values, and no others
    path   of a container, whose keys may be others in each forward; else empty
    """

    name: Callable[[Any], str]
    read: Callable[[], dict[Any, Any]]
    write: Callable[[Mapping[Any, Any]], None]
    path: str = ""


def holders(parts: Mapping[str, nn.Module], attributes: Callable[[nn.Module], Mapping[str, Any]]) -> list[Holder]:
    """Return the holders that the modules reach, by path, but for their own attributes and the lists, dicts and sets
    there. Each is there once, by the first way to it."""
    waiting: deque[tuple[str, Any, int]] = deque()
    for path, part in parts.items():
        waiting += [(f"{path}.{name}".lstrip("."), value, 1) for name, value in attributes(part).items()]
    kinds = dict.fromkeys(kind for part in parts.values() for kind in type(part).__mro__)
    waiting += [(kind.__name__, kind, 0) for kind in kinds]
    found: list[Holder] = []
    for held, names in filter(None, (_globals_of(kind) for kind in kinds if _of_user(kind))):
        found.append(_of_globals(held, names))
        waiting += [(f"global {name}", held[name], 2) for name in names if name in held and _is_state(held[name])]
        waiting += [(name, held[name], 0) for name in names if isinstance(held.get(name), type)]
    seen: set[int] = set()
    while waiting:
        name, value, depth = waiting.popleft()
        made = None if id(value) in seen else _holder(name, value)
        if made is None:
            continue
        seen.add(id(value))
        if depth != 1 or type(value) not in _COPIED:
            found.append(made)
        if depth < _DEPTH:
            inside = made.read().items()
            waiting += [(made.name(key), item, depth + 1) for key, item in inside if not isinstance(item, _PLAIN)]
    return found


def _of_user(kind: type) -> bool:
    """Return whether a class is the user's own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or is_users(file)


def _is_state(value: Any) -> bool:
    """Return whether a value of a class or of a module of Python may count something: it is no part of the program."""
    if isinstance(value, _PLAIN) or type(value) in (*_ORDERED, *_COPIED, tuple):
        return True
    return _is_object(value)


def _is_object(value: Any) -> bool:
    return not isinstance(value, type | nn.Module | Tensor | Enum) and _of_user(type(value))


def _holder(name: str, value: Any) -> Holder | None:
    """Return the holder of a container or an object; None for what holds nothing that is looked at."""
    kind = type(value)
    if kind in (*_ORDERED, *_COPIED, tuple):
        return _container(name, value) if len(value) <= _MOST else None
    if isinstance(value, type):
        return _of_class(name, value) if _of_user(value) and not issubclass(value, Enum) else None
    return Holder(lambda key: f"{name}.{key}", lambda: _held(value), _writer(value)) if _is_object(value) else None


def _container(path: str, value: Any) -> Holder:
    if isinstance(value, dict | set):
        read = (lambda: dict(value)) if isinstance(value, dict) else (lambda: dict.fromkeys(value))
        return Holder(lambda key: f"{path}[{key!r}]", read, lambda held: _refill(value, held), path)
    return Holder(lambda key: f"{path}[{key}]", lambda: dict(enumerate(value)), lambda held: _refill(value, held), path)


def _refill(value: Any, held: Mapping[Any, Any]) -> None:
    if isinstance(value, tuple):
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(held)
    else:
        value.extend(held.values())


def _held(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those of its slots too."""
    names = [name for kind in type(value).__mro__ for name in _slots(kind)]
    slots = {name: found for name in names if (found := getattr(value, name, _MISSING)) is not _MISSING}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(n for n in ((slots,) if isinstance(slots, str) else slots) if not n.startswith("__"))


def _writer(owner: Any) -> Callable[[Mapping[Any, Any]], None]:
    """Return what gives an object these attributes, past methods of its own for that."""

    def write(held: Mapping[Any, Any]) -> None:
        now, own = _held(owner), getattr(owner, "__dict__", {})
        for name in now.keys() - held.keys():
            if own.pop(name, _MISSING) is _MISSING:
                object.__delattr__(owner, name)
        for name, value in held.items():
            if name in own or not any(name in _slots(kind) for kind in type(owner).__mro__):
                own[name] = value
            elif now.get(name, _MISSING) is not value:
                object.__setattr__(owner, name, value)

    return write


# What a class or a module of Python holds is there once in the process, as is what a flag there guards: the definition
# of an operator, say, which cannot be made twice. So flags stay as forward leaves them.


def _of_class(name: str, kind: type) -> Holder:
    def read() -> dict[Any, Any]:
        return {n: v for n, v in vars(kind).items() if not n.startswith("__") and _is_state(v)}

    def write(held: Mapping[Any, Any]) -> None:
        now = read()
        for key in (key for key in now.keys() - held.keys() if not isinstance(now[key], bool)):
            type.__delattr__(kind, key)
        for key, value in held.items():
            if now.get(key, _MISSING) is not value and not isinstance(value, bool):
                type.__setattr__(kind, key, value)

    return Holder(lambda key: f"{name}.{key}", read, write)


def _of_globals(held: dict[str, Any], names: Iterable[str]) -> Holder:
    def read() -> dict[Any, Any]:
        return {name: held[name] for name in names if name in held and _is_state(held[name])}

    def write(values: Mapping[Any, Any]) -> None:
        for name in (name for name in read().keys() - values.keys() if not isinstance(held[name], bool)):
            del held[name]
        held.update({name: value for name, value in values.items() if not isinstance(value, bool)})

    return Holder(lambda name: f"global {name}", read, write)


def _globals_of(kind: type) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    """Return the globals of the class's own forward, and the names of those that it reads or sets."""
    forward: Any = inspect.unwrap(kind.__dict__["forward"]) if "forward" in kind.__dict__ else None
    if not hasattr(forward, "__code__"):
        return None
    return forward.__globals__, tuple(dict.fromkeys(names_in(forward.__code__)))
