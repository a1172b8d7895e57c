"""Lower cross entropy over class indices to five operators that can be split over rows and over classes.

A mean of local means is wrong when ranks hold different numbers of valid rows, so the mean is a sum and a count. With
weights of classes it is a sum and the weights of the labels that count; with them, or smoothed labels, the sum stays
torch's operator, which can be split over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from op_registry.call import DType

from nnscaler.ir.graph import Graph, LogicalTensor, Operation, Region
from nnscaler.tracing.graph_builder import Builder, Form, TensorName, is_floating

_MEAN, _SUM = 1, 2


def lower_cross_entropy(graph: Graph) -> Graph:
    """`aten.cross_entropy_loss(logits[N, C], labels[N])` with a sum or mean, without weights and label smoothing,
    becomes `nnscaler.ce_max, ce_pick, ce_sumexp, ce_tail`, and for a mean `ce_count` and a division. Dims after the
    classes, as in logits[N, C, T], become rows. Other means over class indices, and those of `nll_loss`, become a sum
    and a division; other variants stay.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        if not _lower(operation, builder):
            builder.keep(operation)
    return builder.finish()


_CROSS_ENTROPY = "aten.cross_entropy_loss.default"
_LOSSES = (_CROSS_ENTROPY, "aten.nll_loss.default", "aten.nll_loss_nd.default")
_NAMES = ("logits", "labels", "weight", "reduction", "ignore_index", "label_smoothing")


def _lower(operation: Operation, builder: Builder) -> bool:
    if operation.operator not in _LOSSES:
        return False
    args, kwargs = builder.references(operation)
    kwargs = {{"self": "logits", "target": "labels"}.get(name, name): value for name, value in kwargs.items()}
    given: dict[str, Any] = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(_NAMES, args, strict=False)) | kwargs
    logits, labels = (builder.tensor(given[n].name) for n in ("logits", "labels"))
    if len(logits.shape) < 2 or len(labels.shape) != len(logits.shape) - 1 or is_floating(labels.dtype):
        return False
    plain = operation.operator == _CROSS_ENTROPY and given["weight"] is None and given["label_smoothing"] == 0
    if not plain or given["reduction"] not in (_MEAN, _SUM):
        return given["reduction"] == _MEAN and _emit_division(operation, builder, given, labels)
    if len(labels.shape) > 1:
        logits, labels = _as_rows(operation, builder, logits, labels)
    _emit(operation, builder, logits, labels, given["ignore_index"], given["reduction"] == _MEAN)
    return True


def _emit_division(operation: Operation, builder: Builder, given: Mapping[str, Any], labels: LogicalTensor) -> bool:
    """The operator's sum over rows, divided by what its mean counts."""
    assert operation.outputs[0] is not None
    result = builder.source.tensors[operation.outputs[0]]
    weight, ignore, targets = given["weight"], given["ignore_index"], TensorName(labels.name)

    def emit(name: str, operator: str, args: tuple[Any, ...], of: Form) -> TensorName:
        return builder.make(f"{operation.name}_{name}", operator, args, like=operation, of=of)

    smoothing = (given["label_smoothing"],) if operation.operator == _CROSS_ENTROPY else ()
    scalar = (), result.dtype
    summed = emit("sum", operation.operator, (given["logits"], targets, weight, _SUM, ignore, *smoothing), scalar)
    if len(labels.shape) > 1:
        flat = (prod(labels.shape),)
        targets = emit("labels", "aten.reshape.default", (targets, flat), (flat, labels.dtype))
    if weight is None:
        count = emit("count", "nnscaler.ce_count", (targets, ignore), ((), "int64"))
    else:
        count = emit("count", "nnscaler.ce_weight", (targets, weight, ignore), scalar)
    builder.emit("aten.div.Tensor", (summed, count), outputs=(result,), like=operation, name=operation.name)
    return True


def _as_rows(
    operation: Operation, builder: Builder, logits: LogicalTensor, labels: LogicalTensor
) -> tuple[LogicalTensor, LogicalTensor]:
    """logits[N, C, *D] and labels[N, *D] as [N * D, C] and [N * D]."""
    classes, rows = logits.shape[1], prod(labels.shape)
    last = (0, *range(2, len(logits.shape)), 1)

    def emit(name: str, operator: str, of: LogicalTensor, to: tuple[int, ...]) -> LogicalTensor:
        made = builder.make(f"{operation.name}_{name}", operator, (TensorName(of.name), to), like=operation)
        return builder.tensor(made.name)

    turned = emit("turned", "aten.permute.default", logits, last)
    flat = emit("labels", "aten.reshape.default", labels, (rows,))
    return emit("rows", "aten.reshape.default", turned, (rows, classes)), flat


def _emit(
    operation: Operation, builder: Builder, logits: LogicalTensor, labels: LogicalTensor, ignore: int, mean: bool
) -> None:
    assert operation.outputs[0] is not None
    result = builder.source.tensors[operation.outputs[0]]
    rows = labels.shape

    def emit(name: str, operator: str, args: tuple[Any, ...], of: Form, region: Region | None = None) -> TensorName:
        return builder.make(f"{operation.name}_{name}", operator, args, like=operation, of=of, region=region)

    scores, targets = TensorName(logits.name), TensorName(labels.name)
    wide = "float32" if logits.dtype in ("float16", "bfloat16") else logits.dtype
    off = replace(operation.region, grad_enabled=False)
    peak = emit("max", "nnscaler.ce_max", (scores,), (rows, wide), off)
    picked = emit("pick", "nnscaler.ce_pick", (scores, targets, ignore), (rows, wide))
    # Last, for then its gradient is made first, and its exponentials are gone when that of what is picked is made:
    # backward holds two tensors of the size of the logits, and not three.
    total = emit("sumexp", "nnscaler.ce_sumexp", (scores, peak), (rows, wide))
    last: tuple[str, tuple[Any, ...]] = ("nnscaler.ce_tail", (total, peak, picked, targets, ignore))
    if mean:
        summed = emit("tail", *last, ((), wide))
        count = emit("count", "nnscaler.ce_count", (targets, ignore), ((), "int64"), off)
        last = ("aten.div.Tensor", (summed, count))
    if result.dtype != wide:
        loss = emit("wide", *last, ((), wide))
        last = ("aten.to.dtype", (loss, DType(result.dtype)))
    builder.emit(*last, outputs=(result,), like=operation, name=operation.name)
