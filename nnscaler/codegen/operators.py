"""The names of operators in a rank program."""

from __future__ import annotations

import re
from functools import cache

import torch

# factories take their device from the rank; all other operators from their arguments
FACTORIES = frozenset(
    {
        "arange",
        "zeros",
        "ones",
        "full",
        "empty",
        "scalar_tensor",
        "eye",
        "linspace",
        "logspace",
        "rand",
        "randn",
        "randint",
        "randperm",
        "tril_indices",
        "triu_indices",
        "hann_window",
    }
)
# these draw numbers: they are told their stage, their name, and where their result lies
RANDOM = frozenset(
    f"nnscaler.{name}"
    for name in (
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "random_uniform",
        "random_normal",
    )
)


@cache
def schema(operator: str) -> torch.FunctionSchema | None:
    """Return the schema of a torch.ops overload named `namespace.name.overload`; None where there is none here."""
    parts = operator.split(".")
    if len(parts) != 3:
        return None
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])._schema  # type: ignore[no-any-return]
    except AttributeError:
        return None


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
    namespace, _, rest = operator.partition(".")
    return namespace == "aten" and rest.partition(".")[0] in FACTORIES


def returns_sequence(operator: str, outputs: int) -> bool:
    """Return whether the operator's result has to be unpacked."""
    if outputs != 1:
        return True
    found = schema(operator)
    return found is not None and len(found.returns) == 1 and "List" in str(found.returns[0].type)
