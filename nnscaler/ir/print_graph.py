"""Print graphs as text that says all there is of them: `parse_graph(print_graph(graph)) == graph`
(tests/graph_text.py).

One line stands for each stored tensor, input and operation.
graph Tiny
parameter %weight: float32[8, 4] grad = "weight"
input %x: float32[2, 4] = "x"
%linear: float32[2, 8] grad = aten.linear.default(%x, %weight)  | module="proj" type="Linear" at="tiny.py":7
loss %mean

A model that returns more has a line for each further result, `result "logits" = %linear`, and one that says how it
returns them: `returns {...}` (`nnscaler.runtime.output_structure`). A model without loss has no line for it; one that
casts its loss at the end says so: `loss %mean to bfloat16`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from op_registry.call import DType

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Slot

_RETURNS = "returns "
_WORD = re.compile(r"[A-Za-z_][\w.:]*\Z")


def print_graph(graph: Graph) -> str:
    """Write the graph as text; equal graphs give equal texts."""
    lines = [f"graph {_word(graph.name)}"]
    for tensor in graph.tensors.values():
        if tensor.role != "activation":
            names = ", ".join(json.dumps(f) for f in tensor.fqns)
            lines.append(f"{tensor.role} {_typed(tensor)}" + (f" = {names}" if names else ""))
    lines += [print_operation(operation, graph) for operation in graph.operations]
    lines += [f"update %{buffer} = %{value}" for buffer, value in graph.updates]
    lines += [" to ".join((f"loss %{graph.loss}", *graph.loss_casts))] if graph.loss else []
    lines += [f"result {json.dumps(name)} = %{tensor}" for name, tensor in graph.outputs]
    lines += [f"{_RETURNS}{graph.structure}"] if graph.structure else []
    return "\n".join(lines) + "\n"


def print_operation(operation: Operation, graph: Graph) -> str:
    """Write one operation on one line."""
    outputs = ", ".join("_" if name is None else _typed(graph.tensors[name]) for name in operation.outputs) or "()"
    arguments = [_value(a, operation) for a in operation.args]
    arguments += [f"{key}={_value(v, operation)}" for key, v in operation.kwargs]
    line = f"{outputs} = {_word(operation.operator)}({', '.join(arguments)})"
    fields = " ".join(_fields(operation))
    return f"{line}  | {fields}" if fields else line


def _fields(operation: Operation) -> list[str]:
    first = next((name for name in operation.outputs if name is not None), None)
    fields = [] if operation.name == first else [f"name={json.dumps(operation.name)}"]
    if not operation.region.grad_enabled:
        fields.append("no_grad")
    if operation.region.autocast is not None:
        fields.append(f"autocast={json.dumps(operation.region.autocast)}")
    if operation.region.recompute is not None:
        fields.append(f"recompute={json.dumps(operation.region.recompute)}")
    if operation.module:
        fields.append(f"module={json.dumps(operation.module)}")
    if operation.module_type:
        fields.append(f"type={json.dumps(operation.module_type)}")
    if operation.where is not None:
        fields.append(f"at={json.dumps(operation.where.file)}:{operation.where.line}")
        if operation.where.text:
            fields.append(f"text={json.dumps(operation.where.text)}")
    return fields


def _typed(tensor: LogicalTensor) -> str:
    shape = ", ".join(str(s) for s in tensor.shape)
    master = f" master {tensor.master}" if tensor.master else ""
    master += f" sums {tensor.sums}" if tensor.sums else ""
    return f"%{tensor.name}: {tensor.dtype}[{shape}]" + (" grad" if tensor.needs_grad else "") + master


def _word(text: str) -> str:
    return text if _WORD.match(text) else json.dumps(text)


def _value(value: Any, operation: Operation) -> str:
    if isinstance(value, Slot):
        return f"%{operation.inputs[value.index]}"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v, operation) for v in value) + "]"
    if isinstance(value, tuple):
        inside = ", ".join(_value(v, operation) for v in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    assert value is None or isinstance(value, bool | int | float), f"{value!r} of {operation.operator} has no text"
    return repr(value)
