"""The graph: a model as data, in SSA form and topological order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from nnscaler.ir.operation import LogicalTensor, Operation


@dataclass(frozen=True)
class Graph:
    """A traced model whose result is a scalar loss.

    `tensors`      every tensor, in order of definition: stored ones (parameters, buffers, constants) and inputs
                   first. Unused parameters are listed too: they have no gradient
    `operations`   topologically ordered; each tensor is the output of at most one
    `loss`         the name of the scalar result
    `updates`      (buffer, tensor): the buffer's value after the step
    """

    name: str
    tensors: Mapping[str, LogicalTensor]
    operations: tuple[Operation, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def __getstate__(self) -> dict[str, object]:
        names = ("name", "operations", "loss", "updates")
        return {"tensors": dict(self.tensors), **{n: getattr(self, n) for n in names}}

    def __setstate__(self, state: dict[str, object]) -> None:
        for key, value in state.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        """tensor name -> the operation that makes it."""
        return {name: op for op in self.operations for name in op.outputs if name is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[Operation, int], ...]]:
        """tensor name -> (operation, slot) of every use."""
        uses: dict[str, list[tuple[Operation, int]]] = {name: [] for name in self.tensors}
        for op in self.operations:
            for slot, name in enumerate(op.inputs):
                uses[name].append((op, slot))
        return {name: tuple(found) for name, found in uses.items()}

    @cached_property
    def by_name(self) -> Mapping[str, Operation]:
        return {op.name: op for op in self.operations}

    def with_role(self, *roles: str) -> tuple[LogicalTensor, ...]:
        """Return the tensors with one of these roles, in order of definition."""
        return tuple(t for t in self.tensors.values() if t.role in roles)

    def replace(self, **changes: object) -> Graph:
        return replace(self, **changes)  # type: ignore[arg-type]
