"""Facts of operators that torch itself knows, and that need no table. torch is imported at the first question."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=8192)
def overload_of(operator: str) -> torch._ops.OpOverload | None:
    """Return torch's operator called `aten.linear.default`; None when there is none."""
    import torch

    parts = operator.split(".")
    if len(parts) != 3:
        return None
    found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def schema_of(operator: str) -> torch.FunctionSchema | None:
    """Return the schema of an operator of torch; None when there is none."""
    overload = overload_of(operator)
    return None if overload is None else overload._schema


@lru_cache(maxsize=8192)
def returns_alias(operator: str) -> bool:
    """Return whether every result may lie in the memory of an argument, which is not written."""
    schema = schema_of(operator)
    if schema is None or not schema.returns:
        return False
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and all(result.alias_info is not None for result in schema.returns)


@lru_cache(maxsize=8192)
def is_factory(operator: str) -> bool:
    """Return whether the operator makes its result on the device that it is told, and not on that of a tensor: it has
    an argument `device`, and no `self` to take the device from. Numbers may be tensors, as in `linspace`."""
    schema = schema_of(operator)
    names = () if schema is None else tuple(argument.name for argument in schema.arguments)
    return "device" in names and "self" not in names


@lru_cache(maxsize=8192)
def has_default_dtype(operator: str) -> bool:
    """Return whether the operator is a factory whose dtype may be the process's default: its schema names none."""
    schema = schema_of(operator)
    arguments = () if schema is None else schema.arguments
    return is_factory(operator) and any(a.name == "dtype" and a.default_value is None for a in arguments)


@lru_cache(maxsize=8192)
def may_draw(operator: str) -> bool:
    """Return whether some call of the operator draws random numbers from torch's generator."""
    import torch

    overload = overload_of(operator)
    return overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
