"""Find outputs that backward can compute again at little cost, instead of keeping them.

What a product reads, and an activation function or a norm has made, can be made again from what is kept anyway: of
`x -> gelu -> linear` the input of gelu is kept for its own backward, and its output need not be. A `recompute` step on
both does it. The product itself is not run again, since backward reads what goes into it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from op_registry.registry import facts_of

from nnscaler.ir.gradients_and_kept_values import KeptTensor, kept_by, reads_alone, records, viewed
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature


@dataclass(frozen=True, slots=True)
class CheapOutputs:
    """Cheap operations, one after the other, that make something for a product that comes after them.

    operations  their names, and that of the product
    first       the place of the first one among the graph's operations
    """

    operations: tuple[str, ...]
    first: int

    @property
    def again(self) -> tuple[str, ...]:
        """The operations that backward runs again."""
        return self.operations[:-1]

    @property
    def places(self) -> range:
        """Their places among the graph's operations."""
        return range(self.first, self.first + len(self.operations))


def start_of_cheap(
    operations: Sequence[Operation | None],
    readers: Sequence[Collection[int]],
    end: int,
    signatures: Mapping[str, Signature],
) -> int:
    """Return where the longest run of cheap operations begins that make what the product at `end` reads; `end` where
    there are none.

    operations  in the order in which they run; None: what cannot be computed again
    readers     by operation, the positions that read what it makes; one that no operation has where others read it
    """
    start = end
    while start and _is_cheap(operations[start - 1], signatures):
        if not {*range(start, end + 1)}.issuperset(readers[start - 1]):
            break
        start -= 1
    return start


def _is_cheap(operation: Operation | None, signatures: Mapping[str, Signature]) -> bool:
    """Return whether an operation is no product, and does not keep what it makes."""
    return (
        operation is not None and not facts_of(operation.operator).keeps_result and not signatures[operation.name].flops
    )


def cheap_outputs(
    graph: Graph, signatures: Mapping[str, Signature], kept: Mapping[str, Sequence[KeptTensor]]
) -> tuple[CheapOutputs, ...]:
    """Return, for each product of a graph, the longest run of cheap operations before it that read what is kept
    anyway, where less is kept if they run again.

    There are none where the model checkpoints calls of its own: steps for others would stand in the place of those.

    kept  by operation, what is kept for it and for no earlier one
    """
    if any(op.region.recompute is not None for op in graph.operations):
        return ()
    operations = [op if records(graph, op) else None for op in graph.operations]
    at = {op.name: i for i, op in enumerate(graph.operations)}
    readers = [
        {at[user.name] for name in op.outputs if name is not None for user, _ in graph.consumers[name]}
        | {-1 for name in op.outputs if name in graph.ends}
        for op in graph.operations
    ]
    base = viewed(graph)
    keeps = {own.tensor for found in kept.values() for own in found}
    found = []
    for end, op in enumerate(operations):
        if op is None or not _is_product(graph, op, signatures[op.name]):
            continue
        for start in range(start_of_cheap(operations, readers, end, signatures), end):
            inside = graph.operations[start : end + 1]
            made = {name for one in inside[:-1] for name in one.outputs if name is not None}
            read = {base.get(name, name) for one in inside for name in one.inputs if name not in made}
            needed = {name for name in read if graph.tensors[name].role == "activation"}
            if needed <= keeps and not made.isdisjoint(keeps):
                found.append(CheapOutputs(tuple(one.name for one in inside), start))
                break
    return tuple(found)


def _is_product(graph: Graph, op: Operation, signature: Signature) -> bool:
    return reads_alone(kept_by(graph, op, signature), signature.linear, len(op.inputs))
