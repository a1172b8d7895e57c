"""Decompose composite operators into parts that can be split: training batch norm, attention with dropout, embedding
bags, and what is read of each row of a batch."""

from __future__ import annotations

from itertools import count
from math import inf, sqrt
from typing import Any

from op_registry.call import DType

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation, Region
from nnscaler.tracing.graph_builder import Builder, Form, RawGraph, TensorName

RUNNING_STATISTIC = "nnscaler.running_statistic"


def lower_batch_norm(raw: RawGraph) -> RawGraph:
    """`aten.batch_norm(x, w, b, mean, var, True, momentum, eps, ..)` becomes `nnscaler.batch_mean, batch_variance,
    batch_normalise`, and `running_statistic` for each statistic that is kept. Storing those is left to the in-place
    pass.

    Raises NnscalerError "trace_failed" for instance norm that keeps statistics.
    """
    builder = Builder(raw.graph)
    storages = dict(raw.storages)
    own = count(min((0, *storages.values())) - 1, -1)  # memory that no other tensor has
    for operation in raw.graph.operations:
        if operation.operator == "aten.batch_norm.default" and operation.args[5] is True:
            storages.update(zip(_emit(operation, builder), own, strict=False))
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


def _emit(operation: Operation, builder: Builder) -> list[str]:
    """Emit the parts, and return the tensors that are made on the way."""
    x, weight, bias, old_mean, old_variance, _training, momentum, eps, *_ = builder.references(operation)[0]
    given = builder.tensor(x.name)
    output = builder.source.tensors[operation.outputs[0] or ""]
    channels = given.shape[1:2]
    wide = "float32" if given.dtype in ("float16", "bfloat16") else given.dtype
    off, found = Region(False, operation.region.autocast), list[str]()

    def emit(part: str, operator: str, args: tuple[Any, ...], of: Form, region: Region | None = None) -> TensorName:
        made = builder.make(f"{output.name}_{part}", operator, args, like=operation, of=of, region=region)
        found.append(made.name)
        return made

    mean = emit("batch_mean", "nnscaler.batch_mean", (x,), (channels, wide))
    variance = emit("batch_var", "nnscaler.batch_variance", (x, mean), ((2, *channels), wide))
    args = (x, mean, variance, weight, bias, eps)
    builder.emit("nnscaler.batch_normalise", args, outputs=(output,), like=operation, name=operation.name)
    if old_mean is not None:
        dtype = builder.tensor(old_mean.name).dtype
        emit("mean", RUNNING_STATISTIC, (old_mean, mean, momentum), (channels, dtype), off)
    if old_variance is not None:
        dtype = builder.tensor(old_variance.name).dtype
        unbiased = emit("unbiased", "aten.select.int", (variance, 0, 1), (channels, wide), off)
        emit("var", RUNNING_STATISTIC, (old_variance, unbiased, momentum), (channels, dtype), off)
    return found


def statistic_written(operation: Operation) -> tuple[str, str]:
    """(statistic, its new value) of a `running_statistic`."""
    new = operation.outputs[0]
    assert new is not None
    return operation.inputs[0], new


# Attention that drops out becomes products, a softmax and `nnscaler.dropout`.
# torch draws the mask of the fused operator from a generator that no two ranks share, so that the operator could
# not be split; drawn by `nnscaler.dropout` it can.

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
        tensor, name = builder.tensor(weights.name), f"{operation.name}_dropout"
        of = tensor.shape, tensor.dtype
        dropped = builder.make(name, "nnscaler.dropout", (weights, given["dropout_p"]), like=operation, of=of)
        output = builder.source.tensors[operation.outputs[0] or ""]
        args = (dropped, value)
        builder.emit("aten.matmul.default", args, outputs=(output,), like=operation, name=operation.name)

    def _shape(self, ref: TensorName) -> tuple[int, ...]:
        return self.builder.tensor(ref.name).shape

    def _emit(self, part: str, operator: str, *args: Any, **kwargs: Any) -> TensorName:
        return self.builder.make(f"{self.operation.name}_{part}", operator, args, kwargs, like=self.operation)

    def _repeat(self, x: TensorName, heads: int | None) -> TensorName:
        """Return each head of keys or values as often as query heads share it."""
        *outer, own, length, size = self._shape(x)
        if heads is None or own == heads:
            return x
        x = self._emit("heads", "aten.unsqueeze.default", x, -3)
        x = self._emit("heads", "aten.expand.default", x, (*outer, own, heads // own, length, size))
        return self._emit("heads", "aten.reshape.default", x, (*outer, heads, length, size))

    def _masked(self, scores: TensorName, mask: TensorName | None, causal: bool) -> TensorName:
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


# `aten.embedding_bag` becomes `nnscaler.embedding_bag`, which has the one result that models use.
# Bags of one length, which `torch.nn.functional.embedding_bag` spells as a flat list of ids and an `arange` of
# offsets, become a table of ids again, whose rows can be split. Gradients are dense: `sparse=True` is left out.

_NAMES = (
    "weight",
    "indices",
    "offsets",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)
_SPARSE = 4  # its position in the arguments of an embedding


def lower_embeddings(graph: Graph) -> Graph:
    """Embeddings with dense gradients, and bags whose other results (which bag an entry is in, sizes of bags, places of
    maxima) nobody reads."""
    builder = Builder(graph)
    read = {name for operation in graph.operations for name in operation.inputs} | graph.ends
    producers = {name: operation for operation in graph.operations for name in operation.outputs if name is not None}
    for operation in graph.operations:
        kind = operation.operator
        bag = kind in ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
        if kind == "aten.embedding.default":
            args, kwargs = builder.references(operation)
            kwargs = {name: value for name, value in kwargs.items() if name != "sparse"}
            output = builder.source.tensors[operation.outputs[0] or ""]
            builder.emit(kind, args[:_SPARSE], kwargs, outputs=(output,), like=operation, name=operation.name)
        elif not bag or not _lowered(operation, builder, read, producers):
            builder.keep(operation)
    return builder.finish()


def _lowered(operation: Operation, builder: Builder, read: set[str], producers: dict[str, Operation]) -> bool:
    args, kwargs = builder.references(operation)
    given: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | kwargs
    if (
        given.get("scale_grad_by_freq")
        or operation.outputs[0] is None
        or any(o in read for o in operation.outputs[1:] if o is not None)
    ):
        return False
    indices, offsets, weights = given["indices"], given["offsets"], given.get("per_sample_weights")
    length = _bag_length(producers.get(offsets.name), builder.tensor(indices.name).elements)
    if length and not given.get("include_last_offset", False):
        indices = _table(operation, builder, indices, length)
        weights = None if weights is None else _table(operation, builder, weights, length)
        offsets = None
    rest = (given.get("mode", 0), bool(given.get("include_last_offset", False)), given.get("padding_idx"))
    output = builder.source.tensors[operation.outputs[0]]
    builder.emit(
        "nnscaler.embedding_bag",
        (given["weight"], indices, offsets, weights, *rest),
        outputs=(output,),
        like=operation,
        name=operation.name,
    )
    return True


def _bag_length(offsets: Operation | None, entries: int) -> int:
    """Return the step of `arange(0, entries, step)`, if it divides `entries`; else 0."""
    if offsets is None or offsets.operator != "aten.arange.start_step" or len(offsets.args) < 3:
        return 0
    start, end, step = offsets.args[:3]
    same = start == 0 and end == entries and isinstance(step, int) and step > 0
    return step if same and entries % step == 0 else 0


def _table(operation: Operation, builder: Builder, flat: TensorName, length: int) -> TensorName:
    shape = (builder.tensor(flat.name).elements // length, length)
    return builder.make(f"{flat.name}_table", "aten.reshape.default", (flat, shape), like=operation)


# `x[torch.arange(len(x)), index]` reads of each row what its own index names, as the pooling of a last token does. The
# numbers of all rows are the batch's, so that an index has to be whole; `nnscaler.pick` makes them of a shard's own.

_RESHAPING = ("aten.unsqueeze.default", "aten.reshape.default", "aten.view.default")


def lower_picks(graph: Graph) -> Graph:
    """`aten.index.Tensor(x, [rows, index])` becomes `nnscaler.pick(x, index)` where `rows` counts those of both."""
    builder = Builder(graph)
    producers = {name: operation for operation in graph.operations for name in operation.outputs if name is not None}
    for operation in graph.operations:
        args, _ = builder.references(operation)
        if operation.operator == "aten.index.Tensor" and _picks(args[0], args[1], builder, producers):
            output = builder.source.tensors[operation.outputs[0] or ""]
            picked = (args[0], args[1][1])
            builder.emit("nnscaler.pick", picked, outputs=(output,), like=operation, name=operation.name)
        else:
            builder.keep(operation)
    return builder.finish()


def _picks(x: TensorName, indices: Any, builder: Builder, producers: dict[str, Operation]) -> bool:
    if len(indices) != 2 or None in indices:
        return False
    rows, index = (builder.tensor(i.name) for i in indices)
    count = builder.tensor(x.name).shape[0]
    aligned = rows.shape == (count, *[1] * (len(index.shape) - 1)) and index.shape[:1] == (count,)
    if not aligned or index.dtype in ("bool", "uint8"):  # masks
        return False
    made = producers.get(rows.name)
    while made is not None and made.operator in _RESHAPING:
        made = producers.get(made.inputs[0])
    return made is not None and (made.operator, made.args) in (
        ("aten.arange.default", (count,)),
        ("aten.arange.start", (0, count)),
        ("aten.arange.start_step", (0, count, 1)),
    )
