"""The names of operators in a rank program."""

from __future__ import annotations

import re
from functools import cache

import torch

from op_registry.schema import is_factory, schema_of


def is_builtin(operator: str) -> bool:
    """Return whether a program can name an operator without loading anything of the user's."""
    return operator.startswith(("aten.", "nnscaler."))


@cache
def function_text(operator: str) -> str:
    """Return the text that calls an operator: `aten.linear`, `aten.add.Tensor`, `ops.ce_max`, `user.my_op`."""
    namespace, _, rest = operator.partition(".")
    if namespace == "nnscaler" and rest:
        return f"ops.{rest}"
    if namespace == "aten" and rest:
        name, _, overload = rest.partition(".")
        packet = getattr(torch.ops.aten, name)
        alone = [o for o in packet.overloads() if not o.endswith("out")] == ["default"]
        return f"aten.{name}" if overload == "default" and alone else f"aten.{name}.{overload}"
    return f"user.{user_name(operator)}"


def user_name(operator: str) -> str:
    """Return the attribute under which a program reaches an operator that is not built in."""
    return re.sub(r"\W", "_", operator)


def needs_device(operator: str) -> bool:
    """Return whether the operator takes its device from the rank; all others take it from their arguments."""
    return operator.startswith("aten.") and is_factory(operator)


def returns_sequence(operator: str, outputs: int) -> bool:
    """Return whether the operator's result has to be unpacked."""
    if outputs != 1:
        return True
    found = schema_of(operator)
    return found is not None and len(found.returns) == 1 and "List" in str(found.returns[0].type)
