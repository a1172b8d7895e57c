"""Operators defined with torch for users' functions: one node of a traced graph each.

They are CompositeImplicitAutograd operators: the kernel is the user's function, so that gradients come from it, and
export neither looks inside nor asks for a fake kernel. torch cannot redefine an operator; importing a user's file
again therefore re-points a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any

import torch

from op_registry.numbers_in_user_code import functions_of, names_in, reached_from

NAMESPACE = "nnscaler_user"


class TorchOperators:
    """The operators that this process has defined in `torch.ops.nnscaler_user`. They live as long as this object."""

    def __init__(self) -> None:
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._schemas: dict[str, str] = {}
        self._names: dict[str, str] = {}  # name of the torch operator -> registered name

    def define(self, name: str, schema: str, kernel: Callable[..., Any]) -> torch._ops.OpOverload:
        """Return the torch operator for the registered `name` with this schema, made or re-pointed to `kernel`."""
        operator = self._free_name(name, schema)
        self._kernels[operator] = kernel
        if operator not in self._schemas:
            kernels = self._kernels

            def run(*args: Any, **kwargs: Any) -> Any:
                if not torch.compiler.is_exporting():
                    return kernels[operator](*args, **kwargs)
                with nothing_kept(kernels[operator]):
                    return kernels[operator](*args, **kwargs)

            self._library.define(operator + schema)
            self._library.impl(operator, run, "CompositeImplicitAutograd")
            self._schemas[operator], self._names[operator] = schema, name
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), operator).default
        return overload

    def registered_name(self, overload: torch._ops.OpOverload) -> str | None:
        """Return the registered name of one of these operators; None for any other."""
        namespace, _, operator = overload._schema.name.partition("::")
        return self._names.get(operator) if namespace == NAMESPACE else None

    def _free_name(self, name: str, schema: str) -> str:
        base = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "op"
        base = f"op_{base}" if base[0].isdigit() else base
        number = 1
        while True:
            operator = base if number == 1 else f"{base}_{number}"
            if operator in self._schemas:
                if (self._names[operator], self._schemas[operator]) == (name, schema):
                    return operator
            elif not hasattr(getattr(torch.ops, NAMESPACE), operator):
                return operator
            number += 1


# Put back what a user's function keeps between calls: a trace runs it on tensors without values.
# A table that is made on the first call would else hold such tensors from then on.

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
