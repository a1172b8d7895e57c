"""Batch norm in train mode becomes its parts, which the batch can be split in, and returns its new statistics."""

from __future__ import annotations

from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import LogicalTensor, Operation, Region
from nnscaler.tracing.rewrite import Builder, RawGraph, Ref

RUNNING_STATISTIC = "nnscaler.running_statistic"


def lower_batch_norm(raw: RawGraph) -> RawGraph:
    """`aten.batch_norm(x, w, b, mean, var, True, momentum, eps, ..)` becomes `nnscaler.batch_mean, batch_variance,
    batch_normalise`, and `running_statistic` for each statistic that is kept. Storing those is left to the in-place
    pass.

    Raises NnscalerError "trace_failed" for instance norm that keeps statistics.
    """
    builder = Builder(raw.graph)
    storages = dict(raw.storages)
    for operation in raw.graph.operations:
        if operation.operator == "aten.batch_norm.default" and operation.args[5] is True:
            _emit(operation, builder, storages)
        elif operation.operator == "aten.instance_norm.default" and _keeps_statistics(operation):
            raise NnscalerError(
                "trace_failed",
                "instance norm that keeps running statistics cannot be traced",
                where=operation.where,
                help="construct it with track_running_stats=False",
            )
        else:
            builder.keep(operation)
    return RawGraph(builder.finish(), storages)


def _keeps_statistics(operation: Operation) -> bool:
    return operation.args[5] is True and operation.args[3] is not None and operation.args[4] is not None


def _emit(operation: Operation, builder: Builder, storages: dict[str, int]) -> None:
    x, weight, bias, old_mean, old_variance, _training, momentum, eps, *_ = builder.references(operation)[0]
    given = builder.tensor(x.name)
    output = builder.source.tensors[operation.outputs[0] or ""]
    channels = given.shape[1:2]
    wide = "float32" if given.dtype in ("float16", "bfloat16") else given.dtype
    off = Region(False, operation.region.autocast)

    def emit(
        part: str,
        operator: str,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: str,
        region: Region | None = None,
    ) -> Ref:
        made = LogicalTensor(builder.fresh(f"{output.name}_{part}"), shape, dtype)
        storages[made.name] = -len(storages) - 1  # memory of its own
        builder.emit(operator, args, outputs=(made,), like=operation, region=region)
        return Ref(made.name)

    mean = emit("batch_mean", "nnscaler.batch_mean", (x,), channels, wide)
    variance = emit("batch_var", "nnscaler.batch_variance", (x, mean), (2, *channels), wide)
    args = (x, mean, variance, weight, bias, eps)
    builder.emit("nnscaler.batch_normalise", args, outputs=(output,), like=operation, name=operation.name)
    if old_mean is not None:
        dtype = builder.tensor(old_mean.name).dtype
        emit("mean", RUNNING_STATISTIC, (old_mean, mean, momentum), channels, dtype, off)
    if old_variance is not None:
        dtype = builder.tensor(old_variance.name).dtype
        unbiased = emit("unbiased", "aten.select.int", (variance, 0, 1), channels, wide, off)
        emit("var", RUNNING_STATISTIC, (old_variance, unbiased, momentum), channels, dtype, off)


def statistic_written(operation: Operation) -> tuple[str, str]:
    """(statistic, its new value) of a `running_statistic`."""
    new = operation.outputs[0]
    assert new is not None
    return operation.inputs[0], new
