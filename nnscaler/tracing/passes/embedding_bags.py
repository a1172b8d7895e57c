"""Bags of one size become `nnscaler.embedding_bag` on ids [bags, size].

torch flattens them and says where each bag starts among the ids of all: no shard of the batch could keep those numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.tensor import LogicalTensor
from nnscaler.tracing.rewrite import Builder, Ref

_BAGS = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
_SUM, _MEAN = 0, 1
Makers = Mapping[str, Operation]


def regular_bags(graph: Graph) -> Graph:
    """Sums and means over bags whose offsets are an `arange`; all others stay as they are."""
    builder = Builder(graph)
    makers = {name: op for op in graph.operations for name in op.outputs if name is not None}
    for operation in graph.operations:
        bags = _bags(operation, makers, builder) if operation.operator in _BAGS else None
        if bags is None:
            builder.keep(operation)
        else:
            _emit(operation, bags, makers, builder)
    return builder.finish()


@dataclass(frozen=True)
class _Bags:
    """`count` bags of `size` ids. `padding`: the id that does not count, -1 for none."""

    weight: Ref
    ids: Ref
    scales: Ref | None
    count: int
    size: int
    mean: bool
    padding: int


def _bags(operation: Operation, makers: Makers, builder: Builder) -> _Bags | None:
    """What a call sums, if its bags are of one size and nobody reads where the ids went."""
    args, kwargs = builder.references(operation)
    names = ("weight", "indices", "offsets", "by_frequency", "mode", "sparse", "per_sample_weights", "last", "padding")
    rest = {"by_frequency": False, "mode": _SUM, "sparse": False, "per_sample_weights": None, "last": False}
    given = {**rest, "padding": None, **dict(zip(names, args, strict=False)), **kwargs}
    padding = -1 if given["padding"] is None else given["padding"]
    mean = given["mode"] == _MEAN
    if given["by_frequency"] or given["sparse"] or given["last"] or given["mode"] not in (_SUM, _MEAN):
        return None
    if (mean and padding >= 0) or any(name is not None for name in operation.outputs[1:]):
        return None
    step = _regular_step(makers.get(operation.inputs[2]))
    (ids,), (count,) = builder.tensor(given["indices"].name).shape, builder.tensor(given["offsets"].name).shape
    if not step or step * count != ids:
        return None
    return _Bags(given["weight"], given["indices"], given["per_sample_weights"], count, step, mean, padding)


def _regular_step(offsets: Operation | None) -> int | None:
    """The distance of offsets that an `arange` from 0 makes."""
    if offsets is None or offsets.operator not in (
        "aten.arange.start_step",
        "aten.arange.start",
        "aten.arange.default",
    ):
        return None
    given = offsets.args
    start = given[0] if len(given) > 1 else 0
    step = given[2] if len(given) > 2 else 1
    return step if start == 0 and isinstance(step, int) and step > 0 else None


def _emit(operation: Operation, bags: _Bags, makers: Makers, builder: Builder) -> None:
    output = builder.source.tensors[operation.outputs[0] or ""]
    ids = _whole_bags(bags.ids, bags, operation, makers, builder)
    scales = None if bags.scales is None else _whole_bags(bags.scales, bags, operation, makers, builder)
    args = (bags.weight, ids, scales, *([bags.padding] if bags.padding >= 0 else []))
    if not bags.mean:
        builder.emit("nnscaler.embedding_bag", args, outputs=(output,), like=operation, name=operation.name)
        return
    total = LogicalTensor(builder.fresh(f"{operation.name}_sum"), output.shape, output.dtype)
    builder.emit("nnscaler.embedding_bag", args, outputs=(total,), like=operation)
    parts = (Ref(total.name), float(bags.size))
    builder.emit("aten.div.Scalar", parts, outputs=(output,), like=operation, name=operation.name)


def _whole_bags(flat: Ref, bags: _Bags, operation: Operation, makers: Makers, builder: Builder) -> Ref:
    """[bags * size] as [bags, size]: what was flattened, where that is it."""
    shape = (bags.count, bags.size)
    maker = makers.get(flat.name)
    if maker is not None and maker.operator == "aten.reshape.default":
        before = builder.current(maker.inputs[0])
        if builder.tensor(before).shape == shape:
            return Ref(before)
    dtype = builder.tensor(flat.name).dtype
    made = LogicalTensor(builder.fresh(f"{operation.name}_bags"), shape, dtype)
    builder.emit("aten.reshape.default", (flat, shape), outputs=(made,), like=operation)
    return Ref(made.name)
