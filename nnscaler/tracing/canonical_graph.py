"""Bring an imported graph into one canonical form: without unused operations, and with names counted in order.

Export takes numbers for operations that it drops again, so its names depend on what it looked at on the way.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from op_registry.infer_torch_schema import may_draw

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.graph_builder import LEAF_ROLES, RawGraph, written_inputs

_COPY = re.compile(r"@.*$")
_NUMBER = re.compile(r"_\d+$")


def canonical(raw: RawGraph, state: Mapping[str, Tensor]) -> tuple[RawGraph, dict[str, Tensor]]:
    """Name operations after their operators, `add, add_1, ..`, and number constants by first use.

    An operation goes if nobody reads what it makes, unless it writes into a tensor or draws random numbers: the rule
    of torch.fx.
    """
    operations = _needed(raw.graph)
    naming = _Naming({t.name for t in raw.graph.tensors.values() if t.role in LEAF_ROLES and t.role != "constant"})
    constants: list[LogicalTensor] = []
    outputs: list[LogicalTensor] = []
    renamed: list[Operation] = []
    new_state = {name: tensor for name, tensor in state.items() if not name.startswith("_constants.")}
    tensors = raw.graph.tensors
    for operation in operations:
        for name in operation.inputs:
            if tensors[name].role == "constant" and name not in naming.names:
                constants.append(naming.constant(tensors[name], len(constants)))
                new_state[constants[-1].fqns[0]] = state[tensors[name].fqns[0]]
        chosen = naming.operation(operation)
        outputs.extend(_called(tensors[n], naming.names[n]) for n in operation.outputs if n is not None)
        renamed.append(with_names(operation, chosen, naming.names))
    for _, name in raw.graph.outputs:
        if tensors[name].role == "constant" and name not in naming.names:
            constants.append(naming.constant(tensors[name], len(constants)))
            new_state[constants[-1].fqns[0]] = state[tensors[name].fqns[0]]
    stored = [t for t in tensors.values() if t.role in ("parameter", "buffer")]
    inputs = [t for t in tensors.values() if t.role == "input"]
    ordered = {t.name: t for t in (*stored, *constants, *inputs, *outputs)}
    loss = naming.names.get(raw.graph.loss, raw.graph.loss)
    results = tuple((result, naming.names.get(name, name)) for result, name in raw.graph.outputs)
    graph = raw.graph.replace(tensors=ordered, operations=tuple(renamed), loss=loss, outputs=results)
    storages = {naming.names.get(n, n): s for n, s in raw.storages.items()}
    return RawGraph(graph, {n: s for n, s in storages.items() if n in ordered}), new_state


def with_names(operation: Operation, name: str, names: Mapping[str, str], module: str | None = None) -> Operation:
    """Return the operation under another name, with other names for its tensors. (`replace` takes ten times as
    long.)"""
    return Operation(
        name,
        operation.operator,
        tuple(names.get(n, n) for n in operation.inputs),
        operation.args,
        operation.kwargs,
        tuple(None if n is None else names[n] for n in operation.outputs),
        operation.region,
        operation.where,
        operation.module if module is None else module,
        operation.module_type,
    )


def _called(tensor: LogicalTensor, name: str) -> LogicalTensor:
    return tensor if tensor.name == name else replace(tensor, name=name)


def _needed(graph: Graph) -> list[Operation]:
    used, kept = {name for _, name in graph.results}, []
    for operation in reversed(graph.operations):
        if not used.isdisjoint(operation.outputs) or _acts(operation.operator):
            kept.append(operation)
            used.update(operation.inputs)
    return kept[::-1]


def _acts(operator: str) -> bool:
    """Return whether the operator has an effect besides its results."""
    return bool(written_inputs(operator)) or may_draw(operator)


@dataclass
class _Naming:
    taken: set[str]
    names: dict[str, str] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)

    def constant(self, tensor: LogicalTensor, number: int) -> LogicalTensor:
        name = self._fresh(f"constant_{number}")
        self.names[tensor.name] = name
        return replace(tensor, name=name, fqns=(f"_constants.{number}",))

    def operation(self, operation: Operation) -> str:
        """Return a name for the operation; its outputs are called so too, with the letters of several."""
        old = _COPY.sub("", operation.name)
        chosen = self._fresh(_NUMBER.sub("", old))
        for output in operation.outputs:
            if output is not None:
                letters = _COPY.sub("", output)[len(old) :]
                self.names[output] = self._fresh(chosen + letters) if letters else chosen
        return chosen

    def _fresh(self, base: str) -> str:
        name, number = base, self._next.get(base, 0)
        while name in self.taken or hasattr(builtins, name):  # a program that says `sum` should mean Python's
            number += 1
            name = f"{base}_{number}"
        self._next[base] = number
        self.taken.add(name)
        return name
