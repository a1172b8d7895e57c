"""Attention that drops out becomes products, a softmax and `nnscaler.dropout`.

torch draws the mask of the fused operator from a generator that no two ranks share, so that the operator could not be
split; drawn by `nnscaler.dropout` it can.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

from op_registry.call import DType

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.infer import infer
from nnscaler.tracing.rewrite import Builder, Ref

_ATTENTION = "aten.scaled_dot_product_attention.default"


def lower_attention_dropout(graph: Graph) -> Graph:
    """`scaled_dot_product_attention(q, k, v, mask, p > 0, causal)` becomes matmul, scale, mask, softmax, dropout and
    matmul; without dropout it stays whole.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        given = _arguments(operation, builder) if operation.operator == _ATTENTION else None
        if given is None or not given["dropout_p"]:
            builder.keep(operation)
        else:
            _Lowering(operation, builder).run(given)
    return builder.finish()


def _arguments(operation: Operation, builder: Builder) -> dict[str, Any]:
    args, kwargs = builder.references(operation)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


class _Lowering:
    """Emits the parts of one call."""

    def __init__(self, operation: Operation, builder: Builder) -> None:
        self.operation = operation
        self.builder = builder

    def run(self, given: dict[str, Any]) -> None:
        builder, operation = self.builder, self.operation
        query, key, value = given["query"], given["key"], given["value"]
        heads = self._shape(query)[-3] if given["enable_gqa"] else None
        key, value = (self._repeat(x, heads) for x in (key, value))
        scale = given["scale"] or 1 / sqrt(self._shape(query)[-1])
        turned = self._emit("key", "aten.transpose.int", key, -2, -1)
        scores = self._emit("scores", "aten.matmul.default", query, turned)
        scores = self._emit("scaled", "aten.mul.Tensor", scores, scale)
        scores = self._masked(scores, given["attn_mask"], given["is_causal"])
        weights = self._emit("softmax", "aten.softmax.int", scores, -1)
        tensor = builder.tensor(weights.name)
        dropped = LogicalTensor(builder.fresh(f"{operation.name}_dropout"), tensor.shape, tensor.dtype)
        builder.emit("nnscaler.dropout", (weights, given["dropout_p"]), outputs=(dropped,), like=operation)
        output = builder.source.tensors[operation.outputs[0] or ""]
        args = (Ref(dropped.name), value)
        builder.emit("aten.matmul.default", args, outputs=(output,), like=operation, name=operation.name)

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self.builder.tensor(ref.name).shape

    def _emit(self, part: str, operator: str, *args: Any, **kwargs: Any) -> Ref:
        ((shape, dtype),) = infer(operator, args, kwargs, self.builder.tensor)  # type: ignore[misc]
        made = LogicalTensor(self.builder.fresh(f"{self.operation.name}_{part}"), shape, dtype)
        self.builder.emit(operator, args, kwargs, outputs=(made,), like=self.operation)
        return Ref(made.name)

    def _repeat(self, x: Ref, heads: int | None) -> Ref:
        """Return each head of keys or values as often as query heads share it."""
        *outer, own, length, size = self._shape(x)
        if heads is None or own == heads:
            return x
        x = self._emit("heads", "aten.unsqueeze.default", x, -3)
        x = self._emit("heads", "aten.expand.default", x, (*outer, own, heads // own, length, size))
        return self._emit("heads", "aten.reshape.default", x, (*outer, heads, length, size))

    def _masked(self, scores: Ref, mask: Ref | None, causal: bool) -> Ref:
        if causal:
            rows, columns = self._shape(scores)[-2:]
            full = self._emit("ones", "aten.ones.default", (rows, columns), dtype=DType("bool"))
            mask = self._emit("causal", "aten.tril.default", full)
        if mask is None:
            return scores
        if self.builder.tensor(mask.name).dtype == "bool":
            hidden = self._emit("hidden", "aten.logical_not.default", mask)
            return self._emit("masked", "aten.masked_fill.Scalar", scores, hidden, -inf)
        return self._emit("masked", "aten.add.Tensor", scores, mask)
