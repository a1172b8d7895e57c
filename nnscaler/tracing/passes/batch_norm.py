"""Batch norm in train mode returns its new statistics instead of writing them."""

from __future__ import annotations

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation import Operation
from nnscaler.tracing.raw import RawGraph
from nnscaler.tracing.rewrite import Builder

BATCH_NORM = "nnscaler.batch_norm"


def lower_batch_norm(raw: RawGraph) -> RawGraph:
    """`aten.batch_norm(x, w, b, mean, var, True, momentum, eps, ..)` becomes `nnscaler.batch_norm(x, w, b, mean, var,
    momentum, eps) -> (y, new_mean, new_var)`. Storing the new values is left to the in-place pass.

    Raises NnscalerError "trace_failed" for instance norm that keeps statistics.
    """
    builder = Builder(raw.graph)
    storages = dict(raw.storages)
    for operation in raw.graph.operations:
        if _keeps_statistics(operation, "aten.batch_norm.default", 5):
            x, weight, bias, mean, variance, _training, momentum, eps, *_ = builder.references(operation)[0]
            output = builder.source.tensors[operation.outputs[0] or ""]
            news = []
            for statistic, suffix in ((mean, "mean"), (variance, "var")):
                old = builder.tensor(statistic.name)
                name = builder.fresh(f"{output.name}_{suffix}")
                news.append(type(old)(name, old.shape, old.dtype))
                storages[name] = -len(storages) - 1  # memory of its own
            args = (x, weight, bias, mean, variance, momentum, eps)
            builder.emit(BATCH_NORM, args, outputs=(output, *news), like=operation, name=operation.name)
        elif _keeps_statistics(operation, "aten.instance_norm.default", 5):
            raise NnscalerError(
                "trace_failed",
                "instance norm that keeps running statistics cannot be traced",
                where=operation.where,
                help="construct it with track_running_stats=False",
            )
        else:
            builder.keep(operation)
    return RawGraph(builder.finish(), storages)


def _keeps_statistics(operation: Operation, operator: str, training: int) -> bool:
    if operation.operator != operator:
        return False
    return operation.args[training] is True and operation.args[3] is not None and operation.args[4] is not None


def statistics_written(operation: Operation) -> tuple[tuple[str, str], ...]:
    """(statistic, its new value) of a lowered batch norm."""
    mean, variance = operation.args[3], operation.args[4]
    new_mean, new_variance = operation.outputs[1], operation.outputs[2]
    assert new_mean is not None and new_variance is not None
    return ((operation.inputs[mean.index], new_mean), (operation.inputs[variance.index], new_variance))
