"""Define operators with torch for users' functions: one node of a traced graph each.

They are CompositeImplicitAutograd operators: the kernel is the user's function, so that gradients come from it, and
export neither looks inside nor asks for a fake kernel. torch cannot redefine an operator; importing a user's file
again therefore re-points a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from op_registry.put_back_what_calls_keep import nothing_kept

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
