"""Graphs that are built by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nnscaler.ir.graph import Graph, LogicalTensor, Operation


@dataclass
class Builder:
    """Writes a graph; operation `n` makes tensor `n`. `costs` are given with the operations."""

    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)

    def stored(self, name: str, role: str) -> str:
        grad = role == "parameter"
        self.tensors[name] = LogicalTensor(name, (4,), "float32", role, grad, (name,))  # type: ignore[arg-type]
        return name

    def op(self, name: str, inputs: Iterable[str], module: str = "", *, cost: float = 1, elements: int = 4) -> str:
        inputs = tuple(inputs)
        grad = any(self.tensors[n].needs_grad for n in inputs)
        self.tensors[name] = LogicalTensor(name, (elements,), "float32", "activation", grad)
        self.operations.append(Operation(name, "op", inputs, (), (), (name,), module=module))
        self.costs[name] = cost
        return name

    def graph(self, loss: str, updates: tuple[tuple[str, str], ...] = ()) -> Graph:
        return Graph("model", self.tensors, tuple(self.operations), loss, updates)

    def cost(self, op: Operation) -> float:
        return self.costs[op.name]
