"""Random operators become arithmetic on `nnscaler.random_uniform` and `nnscaler.random_normal`.

torch draws from a generator that no two ranks share: ranks that should hold equal copies would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from op_registry.call import DType
from op_registry.registry import facts_of
from op_registry.schema import may_draw

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.draws import formula_of, numbers_of
from nnscaler.tracing.infer import infer
from nnscaler.tracing.rewrite import Builder, Ref

_ATTENTION = "aten.scaled_dot_product_attention.default"  # its dropout has a pass of its own


def lower_random_draws(graph: Graph) -> Graph:
    """Write every operator that `tracing.draws` has a formula for as that formula.

    Raises NnscalerError "trace_failed" for operators that draw and have none.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        if not draws(operation):
            builder.keep(operation)
            continue
        formula = formula_of(operation.operator)
        if formula is None:
            raise NnscalerError(
                "trace_failed",
                f"{operation.operator} draws random numbers from torch's generator, which no two ranks share",
                where=operation.where,
                help="draw with torch.rand, randn, bernoulli, randint, ... or apply nn.Dropout outside of it",
            )
        args, kwargs = builder.references(operation)
        output = builder.source.tensors[operation.outputs[0] or ""]
        made = formula(_Emitter(operation, builder), numbers_of(args, kwargs), output.shape, output.dtype)
        builder.alias(output.name, made.name)
    return builder.finish()


def draws(operation: Operation) -> bool:
    """Return whether an operator of torch draws random numbers in this call."""
    if operation.operator == _ATTENTION or not operation.operator.startswith("aten."):
        return False
    told = facts_of(operation.operator).draws_if
    if told:
        return all(place < len(operation.args) and bool(operation.args[place]) for place in told)
    return may_draw(operation.operator)


class _Emitter:
    """Makes operations in place of one random operation."""

    def __init__(self, operation: Operation, builder: Builder) -> None:
        self._operation = operation
        self._builder = builder

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> Ref:
        made = self._new(kind, tuple(shape), dtype)
        self._builder.emit(
            f"nnscaler.random_{kind}", (tuple(shape), DType(dtype)), outputs=(made,), like=self._operation
        )
        return Ref(made.name)

    def call(self, operator: str, *args: Any) -> Ref:
        ((shape, dtype),) = infer(operator, args, {}, self._builder.tensor)  # type: ignore[misc]
        made = self._new(operator.split(".")[1], shape, dtype)
        self._builder.emit(operator, args, outputs=(made,), like=self._operation)
        return Ref(made.name)

    def dtype(self, value: Ref) -> str:
        return self._builder.tensor(value.name).dtype

    def _new(self, part: str, shape: tuple[int, ...], dtype: str) -> LogicalTensor:
        return LogicalTensor(self._builder.fresh(f"{self._operation.name}_{part}"), shape, dtype)
