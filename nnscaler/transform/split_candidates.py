"""Find the splits worth considering: a work-list fixpoint that carries them between producers and consumers.

A split of a `view`'s heads induces a strided split of the packed `qkv` projection five operations earlier, which no
identifier of the projection names by itself. Terminates because an `outer` divides the size of its identifier. The walk
is per tensor layout; a global union of dims would merge batch and sequence through `view(-1)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nnscaler.ir.derive_operand_layouts import even_or_balanced, input_states, is_legal, output_states, resolve
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Split
from nnscaler.layout import Sharded, State

Candidates = Mapping[str, tuple[Split, ...]]


def all_candidates(graph: Graph, signatures: Mapping[str, Signature], parts: int) -> Candidates:
    """Return every split of every operation that an identifier names, or that a neighbour's split induces."""
    seeds = [
        (op, even_or_balanced(signatures[op.name], identifier, parts))
        for op in graph.operations
        for identifier in signatures[op.name].identifiers
    ]
    return _fixpoint(graph, signatures, parts, seeds)


def reach(graph: Graph, signatures: Mapping[str, Signature], parts: int, layouts: Mapping[str, State]) -> Candidates:
    """Return the splits induced, transitively, by these states of these tensors: those that a batch dim of the inputs
    reaches."""
    places = _by_tensor(graph)
    seeds: list[tuple[Operation, Split]] = []
    for name, state in layouts.items():
        seeds.extend(_induced(signatures, parts, places, name, state))
    return _fixpoint(graph, signatures, parts, seeds)


def spread(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, operation: Operation, split: Split
) -> Candidates:
    """Return the splits that one split of one operation induces, transitively, itself included."""
    return _fixpoint(graph, signatures, parts, [(operation, split)])


def _fixpoint(
    graph: Graph,
    signatures: Mapping[str, Signature],
    parts: int,
    seeds: Iterable[tuple[Operation, Split]],
) -> Candidates:
    places = _by_tensor(graph)
    seen: set[tuple[str, State]] = set()  # a tensor that every layer reads would be walked once per layer and layer
    found: dict[str, dict[Split, None]] = {op.name: {} for op in graph.operations}
    pending = [(op, split) for op, split in seeds if is_legal(signatures[op.name], split, parts)]
    while pending:
        op, split = pending.pop()
        if split in found[op.name]:
            continue
        found[op.name][split] = None
        signature = signatures[op.name]
        states = (
            *zip(op.inputs, input_states(signature, split), strict=True),
            *zip(op.outputs, output_states(signature, split, len(op.outputs)), strict=True),
        )
        for name, state in states:
            if name is None or not isinstance(state, Sharded) or (name, state) in seen:
                continue
            seen.add((name, state))
            for other, induced in _induced(signatures, parts, places, name, state):
                if induced not in found[other.name]:
                    pending.append((other, induced))
    return {name: tuple(sorted(splits, key=_order)) for name, splits in found.items()}


def _order(split: Split) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    return (split.identifier, split.outer, split.sections, split.sizes)


def _induced(
    signatures: Mapping[str, Signature],
    parts: int,
    places: Mapping[str, tuple[tuple[Operation, bool, int], ...]],
    name: str,
    state: State,
) -> Iterable[tuple[Operation, Split]]:
    for op, is_output, position in places[name]:
        signature = signatures[op.name]
        key = ("induced", is_output, position, state, parts)
        if key not in signature.memo:
            signature.memo[key] = split_of(signature, is_output, position, state, parts)
        split = signature.memo[key]
        if split is not None:
            yield op, split


def split_of(signature: Signature, is_output: bool, position: int, state: State, parts: int) -> Split | None:
    """Return the legal split that gives an operand this state."""
    if signature.bound is None:
        return None
    operands = signature.bound.outputs if is_output else signature.bound.inputs
    split = resolve(operands[position] if position < len(operands) else None, state, parts)
    return split if split is not None and is_legal(signature, split, parts) else None


def _by_tensor(graph: Graph) -> Mapping[str, tuple[tuple[Operation, bool, int], ...]]:
    """Map each tensor to (operation, is output, position) of every place where it stands."""
    places: dict[str, list[tuple[Operation, bool, int]]] = {name: [] for name in graph.tensors}
    for op in graph.operations:
        for slot, name in enumerate(op.inputs):
            places[name].append((op, False, slot))
        for position, output in enumerate(op.outputs):
            if output is not None:
                places[output].append((op, True, position))
    return {name: tuple(found) for name, found in places.items()}
