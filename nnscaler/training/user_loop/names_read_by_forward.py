"""Find what the code of a model's forward reads: names of attributes, and globals of the user's files."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from nnscaler.is_user_file import is_users

_MACHINERY = ("torch.nn.modules.module", "lightning.", "pytorch_lightning.")  # it changes attributes of its own
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class ReadNames(NamedTuple):
    """Names that forward, and the methods that it calls, may read.

    attributes  names of attributes, of whatever object
    globals     of the user's files: where they are kept, and the name
    """

    attributes: tuple[str, ...]
    globals: tuple[tuple[dict[str, Any], str], ...]


@cache
def names_read_by_forward(kinds: frozenset[type]) -> ReadNames:
    """Return what may be read in forward, and in methods that it calls, of modules of these classes, which call each
    other's."""
    names: dict[str, None] = {"forward": None}
    around: dict[tuple[int, str], dict[str, Any]] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        for method in filter(None, (_code_of(kind, name) for kind in kinds)):
            for instruction in _instructions(method.__code__):
                read = instruction.argval
                if instruction.opname in _READS and read not in names and read != "training":
                    names[read] = None
                    waiting.append(read)
                elif instruction.opname == "LOAD_GLOBAL" and read in method.__globals__ and _of_user(method):
                    around[id(method.__globals__), read] = method.__globals__
    return ReadNames(tuple(names), tuple((held, name) for (_, name), held in around.items()))


def _code_of(kind: type, name: str) -> Any:
    """Return the function that runs for a method or property of a class; None for one of the machinery, or for none."""
    found = inspect.getattr_static(kind, name, None)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    function = inspect.unwrap(found) if callable(found) else None
    machinery = str(getattr(function, "__module__", "")).startswith(_MACHINERY)
    return function if inspect.isfunction(function) and not machinery else None


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _instructions(constant)


def _of_user(method: Any) -> bool:
    return bool(method.__module__ == "__main__" or is_users(method.__code__.co_filename))
