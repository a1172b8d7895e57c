"""In-place ATen operators: what they write to, and the operator that gives the same as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

# Arguments that are written to, in training, although the schema does not say so.
UNDECLARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"aten.native_batch_norm.default": ("running_mean", "running_var")}
)


def written(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes to, in the order of the schema."""
    schema = overload._schema
    hidden = UNDECLARED.get(str(overload), ())
    if hidden and not args[5]:  # `training`
        hidden = ()
    if not schema.is_mutable and not hidden:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in hidden:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value] if value is not None else []
    return found


def functional(overload: Any) -> Any:
    """Return the operator that returns what this one writes; the operator itself where there is none."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    if not packet.endswith("_") or packet.endswith("__"):
        return overload
    found = getattr(getattr(torch.ops.aten, packet[:-1], None), name, None)
    return overload if found is None else found
