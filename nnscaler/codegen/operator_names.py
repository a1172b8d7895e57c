"""The names of operators in a rank program."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from op_registry.registry import default_registry
from op_registry.torch_schema import is_factory, schema_of


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


# Locate the operators that are not built in, for rank processes.

Origin = tuple[str, str]  # a file, or the dotted name of an installed module; and the qualified name in it


def operator_origins(operators: Iterable[str], functions: Mapping[str, Callable[..., Any] | type]) -> dict[str, Origin]:
    """Return, by operator, the origin from which a process can load it.

    That is the place of its registration, of the `autograd.Function` that it stands for, or of the `torch.library`
    definition that some package made. Operators that a process cannot load are left out.
    """
    registry = default_registry()
    found: dict[str, Origin] = {}
    for operator in sorted({o for o in operators if not is_builtin(o)}):
        spec = registry.lookup(operator)
        definition = OPDEFS.get("::".join(operator.split(".")[:2]))
        if spec is not None and spec.where is not None:
            found[operator] = (spec.where.file, spec.qualname or "")
        elif operator in functions:
            found[operator] = origin_of(functions[operator])
        elif definition is not None:
            found[operator] = origin_of(definition._init_fn)
    return found


def operator_files(origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return, by name as it stands in rank programs, the file of operators.

    The programs name no folder of this machine, except where two files have one name: a program must not take the one
    for the other.
    """
    files = sorted({file for file, _ in origins.values() if file.endswith(".py")})
    names = [Path(file).name for file in files]
    return {name if names.count(name) == 1 else file: file for name, file in zip(names, files, strict=True)}


def written_origins(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return the origins as they stand in rank programs."""
    names = {file: name for name, file in operator_files(origins).items()}
    return {operator: (names.get(file, file), qualname) for operator, (file, qualname) in origins.items()}


def origin_of(thing: Callable[..., Any] | type) -> Origin:
    """Return the module's name where the module belongs to a package, whose relative imports need it; else its file."""
    module = sys.modules.get(thing.__module__)
    private = thing.__module__.startswith("_nnscaler_user")  # a model file: the runtime's loader named it
    if module is not None and getattr(module, "__package__", None) and not private:
        return thing.__module__, thing.__qualname__
    try:
        return inspect.getsourcefile(thing) or "", thing.__qualname__
    except TypeError:
        return "", thing.__qualname__
