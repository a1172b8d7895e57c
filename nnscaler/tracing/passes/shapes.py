"""Reshaping is spelled one way, with explicit sizes; so are expansion and the dtypes of factories."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.registry import facts_of
from op_registry.torch_schema import has_default_dtype

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.tracing.rewrite import Builder


def spell_shapes(graph: Graph) -> Graph:
    """Views and reshapes become `aten.reshape(x, sizes)` (strides of the traced run are not a property of shards),
    expansions `aten.expand(x, sizes)`, and factories name their dtype.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        if not _spell(operation, builder):
            builder.keep(operation)
    return builder.finish()


def _spell(operation: Operation, builder: Builder) -> bool:
    kind = operation.operator
    if not operation.outputs or operation.outputs[0] is None:
        return False
    args, kwargs = builder.references(operation)
    output = builder.source.tensors[operation.outputs[0]]
    moves = facts_of(kind).moves
    if moves == "reshape":
        spelled, args, kwargs = "aten.reshape.default", (args[0], output.shape), {}
    elif moves == "expand":
        spelled, args, kwargs = "aten.expand.default", (args[0], output.shape), {}
    elif kind.startswith("aten.") and has_default_dtype(kind):
        spelled, kwargs = kind, {**kwargs, "dtype": DType(output.dtype)}
    else:
        return False
    builder.emit(spelled, args, kwargs, outputs=(output,), like=operation, name=operation.name)
    return True
