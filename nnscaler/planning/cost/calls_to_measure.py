"""Collect the operator calls to measure: the shards of a graph's operations that a plan over some ranks may run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from op_registry.bind_and_localise_call import localise
from op_registry.call import Call, TensorArgument, map_leaves
from op_registry.rank_expression import Expression
from op_registry.registry import facts_of
from op_registry.spec import Refusal

from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices, input_layouts, output_layouts, shards_of
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, Split
from nnscaler.layout import local_shape
from nnscaler.planning.cost.flops_and_memory_traffic import computes_in
from nnscaler.planning.cost.model_protocol import Shape

Meshes = tuple[tuple[int, ...], ...]
Key = tuple[str, tuple[Shape | None, ...], tuple[Shape | None, ...], str]


@dataclass(frozen=True)
class ShardCall:
    """One rank's call of an operation (the first rank's, where ranks differ).

    signature    of the whole operation
    call         the operator with the shard's arguments
    shapes_in    of the shard's inputs
    shapes_out   of the shard's outputs; None for one that is not used
    dtype        of its floating operands
    needs_grad   by input
    """

    signature: Signature
    call: Call
    shapes_in: tuple[Shape, ...]
    shapes_out: tuple[Shape | None, ...]
    dtype: str
    needs_grad: tuple[bool, ...]

    @property
    def key(self) -> Key:
        return key_of(self.signature, self.shapes_in, self.shapes_out, self.dtype)


def key_of(
    signature: Signature, shapes_in: tuple[Shape | None, ...], shapes_out: tuple[Shape | None, ...], dtype: str
) -> Key:
    """Return the key that a measurement is filed under: the operator's signature and the shard's shapes."""
    found: str | None = signature.memo.get(("text",))
    if found is None:
        found = signature.memo["text",] = signature_text(signature.call)
    return found, shapes_in, shapes_out, dtype


def signature_text(call: Call) -> str:
    """Return the operator, its tensors' dtypes and its other arguments as text: `aten.softmax.int(float32, -1)`."""
    arguments = [_text(a) for a in call.args] + [f"{name}={_text(a)}" for name, a in sorted(call.kwargs.items())]
    return f"{call.operator}({', '.join(arguments)})"


def shard_calls(
    graph: Graph, signatures: Mapping[str, Signature], ranks: int, micro_batches: int = 1
) -> tuple[ShardCall, ...]:
    """Return every different shard of every operation but views, in the order of the graph.

    Each runs whole, or split by one or two axes whose sizes divide `ranks` times `micro_batches`, which cut the batch
    as an axis would.
    """
    found: dict[Key, ShardCall] = {}
    done: set[tuple[int, tuple[bool, ...]]] = set()
    for op in graph.operations:
        signature = signatures[op.name]
        grads = _grads(graph, op)
        if facts_of(op.operator).view or (id(signature), grads) in done:
            continue
        done.add((id(signature), grads))
        for mesh in meshes(ranks * micro_batches):
            for shard in _shards(graph, op, signature, mesh, grads):
                found.setdefault(shard.key, shard)
    return tuple(found.values())


def meshes(ranks: int) -> Meshes:
    """Return () for the whole, then the sizes of one and of two axes whose product divides `ranks`."""
    sizes = [n for n in range(2, ranks + 1) if ranks % n == 0]
    pairs = [(a, b) for a in sizes for b in sizes if ranks % (a * b) == 0]
    return ((), *((n,) for n in sizes), *pairs)


def _grads(graph: Graph, op: Operation) -> tuple[bool, ...]:
    recorded = op.region.grad_enabled and any(n is not None and graph.tensors[n].needs_grad for n in op.outputs)
    return tuple(recorded and graph.tensors[name].needs_grad for name in op.inputs)


def _shards(
    graph: Graph, op: Operation, signature: Signature, mesh: tuple[int, ...], grads: tuple[bool, ...]
) -> Iterator[ShardCall]:
    axes = [(f"axis{i}", size) for i, size in enumerate(mesh)]
    splits: list[Choice] = [Split(name) for name in signature.identifiers]
    for choices in product(splits, repeat=len(mesh)):
        if explain_illegal_choices(graph, op, signature, choices, axes) is None:
            shard = _shard(graph, op, signature, choices or (RunInvariant(),), axes or [("whole", 1)], grads)
            if shard is not None:
                yield shard


def _shard(
    graph: Graph,
    op: Operation,
    signature: Signature,
    choices: tuple[Choice, ...],
    axes: list[tuple[str, int]],
    grads: tuple[bool, ...],
) -> ShardCall | None:
    sizes = [size for _, size in axes]
    needed = input_layouts(graph, op, signature, choices)
    made = output_layouts(graph, op, signature, choices)
    shapes_in = tuple(local_shape(v, sizes, graph.tensors[n].shape) for v, n in zip(needed, op.inputs, strict=True))
    pairs = list(zip(made, op.outputs, strict=True))
    shapes_out = tuple(None if n is None else local_shape(v, sizes, graph.tensors[n].shape) for v, n in pairs)
    if any(not prod(shape) for shape in shapes_in):
        return None
    call = signature.call
    if signature.spec is not None:
        local = [None if n is None else shape_of_rank(v, axes, graph.tensors[n].shape) for v, n in pairs]
        try:
            call = localise(signature.spec, call, shards_of(signature, choices, axes), local)
        except Refusal:
            return None
    first = dict.fromkeys((name for name, _ in axes), 0)
    outputs = tuple(
        None if t is None or s is None else TensorArgument(t.index, s, t.dtype)
        for t, s in zip(signature.call.outputs, shapes_out, strict=True)
    )

    def of_first_rank(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return TensorArgument(value.index, shapes_in[value.index], value.dtype)
        return value.evaluate(first) if isinstance(value, Expression) else value

    args = map_leaves(call.args, of_first_rank)
    kwargs = {name: map_leaves(a, of_first_rank) for name, a in call.kwargs.items()}
    dtype = computes_in(t.dtype for t in (*signature.call.tensors(), *outputs) if t is not None)
    own = Call(call.operator, args, kwargs, outputs)
    return ShardCall(signature, own, shapes_in, shapes_out, dtype, grads)


def _text(value: Any) -> str:
    if isinstance(value, TensorArgument):
        return value.dtype
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(getattr(value, "name", value))
