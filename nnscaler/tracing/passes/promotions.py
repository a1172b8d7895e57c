"""Operators that make floating numbers of integers get floating numbers instead.

`indices * 0.1` has torch's default dtype, which is the process's: a rank's need not be that of the model, and an exact
run needs float64 there. A dtype that stands in the graph is right everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from op_registry.call import DType

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.infer import is_floating
from nnscaler.tracing.rewrite import Builder, Ref, map_references

_WHERE = "aten.where.Scalar"


def spell_promotions(graph: Graph) -> Graph:
    """Operators of torch with a floating result and only integers or booleans among their tensors read casts of these;
    `where(condition, 0.1, 0.2)` chooses between tensors of the result's dtype."""
    builder = Builder(graph)
    for operation in graph.operations:
        if _promotes(operation, builder):
            _spell(operation, builder)
        else:
            builder.keep(operation)
    return builder.finish()


def _promotes(operation: Operation, builder: Builder) -> bool:
    output = operation.outputs[0] if len(operation.outputs) == 1 else None
    if output is None or not operation.inputs or not operation.operator.startswith("aten."):
        return False
    if any(isinstance(v, DType) for v in _leaves((operation.args, operation.kwargs))):
        return False
    made = builder.source.tensors[output].dtype
    return is_floating(made) and not any(is_floating(builder.tensor(name).dtype) for name in operation.inputs)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _spell(operation: Operation, builder: Builder) -> None:
    args, kwargs = builder.references(operation)
    output = builder.source.tensors[operation.outputs[0] or ""]
    dtype = DType(output.dtype)

    def emit(part: str, operator: str, shape: tuple[int, ...], *given: Any, **named: Any) -> Ref:
        made = LogicalTensor(builder.fresh(f"{operation.name}_{part}"), shape, output.dtype)
        builder.emit(operator, given, named, outputs=(made,), like=operation)
        return Ref(made.name)

    def cast(ref: Ref) -> Ref:
        return emit("operand", "aten.to.dtype", builder.tensor(ref.name).shape, ref, dtype)

    operator = operation.operator
    if operator == _WHERE:
        condition, *choices = args
        scalars = (emit("choice", "aten.scalar_tensor.default", (), number, dtype=dtype) for number in choices)
        operator, args = "aten.where.self", (condition, *scalars)
    else:
        args = tuple(map_references(a, cast) for a in args)
        kwargs = {k: map_references(v, cast) for k, v in kwargs.items()}
    builder.emit(operator, args, kwargs, outputs=(output,), like=operation, name=operation.name)
