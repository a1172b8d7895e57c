"""`aten.embedding_bag` becomes `nnscaler.embedding_bag`, which has the one result that models use.

Bags of one length, which `torch.nn.functional.embedding_bag` spells as a flat list of ids and an `arange` of offsets,
become a table of ids again, whose rows can be split.
"""

from __future__ import annotations

from typing import Any

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.rewrite import Builder, Ref

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


def lower_embedding_bag(graph: Graph) -> Graph:
    """Calls whose other results (which bag an entry is in, sizes of bags, places of maxima) nobody reads."""
    builder = Builder(graph)
    read = (
        {name for operation in graph.operations for name in operation.inputs}
        | {graph.loss}
        | {v for _, v in graph.updates}
    )
    producers = {name: operation for operation in graph.operations for name in operation.outputs if name is not None}
    for operation in graph.operations:
        kind = operation.operator
        bag = kind in ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
        if not bag or not _lowered(operation, builder, read, producers):
            builder.keep(operation)
    return builder.finish()


def _lowered(operation: Operation, builder: Builder, read: set[str], producers: dict[str, Operation]) -> bool:
    args, kwargs = builder.references(operation)
    given: dict[str, Any] = dict(zip(_NAMES, args, strict=False)) | kwargs
    counts_ids = given.get("scale_grad_by_freq") or given.get("sparse")
    if counts_ids or operation.outputs[0] is None or any(o in read for o in operation.outputs[1:] if o is not None):
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


def _table(operation: Operation, builder: Builder, flat: Ref, length: int) -> Ref:
    source = builder.tensor(flat.name)
    shape = (source.elements // length, length)
    made = LogicalTensor(builder.fresh(f"{flat.name}_table"), shape, source.dtype)
    builder.emit("aten.reshape.default", (flat, shape), outputs=(made,), like=operation)
    return Ref(made.name)
