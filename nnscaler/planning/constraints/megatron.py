"""Constraints of Megatron-style plans: Megatron's division of layers over tp, and sequence parallelism between its
pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from op_registry.annotation.splits import balanced

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Split
from nnscaler.layout import Sharded, State
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint
from nnscaler.transform.complete_plan import batch_of, batch_states
from nnscaler.transform.plan import DP
from nnscaler.transform.propagate_choices import reach
from nnscaler.transform.select_operations import layers_of

TWO = 2  # parts, for which identifiers are looked for: which they are does not depend on it


def megatron(graph: Graph, signatures: Mapping[str, Signature]) -> Constraint:
    """Constrain tp to Megatron's layout (Shoeybi et al. 2019).

    Pairs of weights in layers are cut by outputs, then by inputs; vocabularies by their rows; norms, the residual
    stream and single weights are whole. Operations inside of a pair are free.
    """
    roles = roles_of(graph, signatures)

    def allows(op: Operation, choice: Choice) -> bool:
        if op.name in roles.cut:
            return isinstance(choice, Split) and choice.identifier in roles.cut[op.name]
        return op.name not in roles.whole or not isinstance(choice, Split)

    return Constraint("megatron", allows=allows)


def sequence_parallel(graph: Graph, signatures: Mapping[str, Signature]) -> Constraint:
    """Constrain tp as `megatron`, but split what that keeps whole along the sequence wherever it has one.

    These are norms, dropout, and the residual stream (Korthikanti et al., "Reducing Activation Recomputation", 2022).
    """
    roles = roles_of(graph, signatures)
    along = _sequence(graph, signatures, roles)

    def allows(op: Operation, choice: Choice) -> bool:
        wanted = roles.cut.get(op.name) or along.get(op.name)
        if wanted:
            return isinstance(choice, Split) and choice.identifier in wanted
        return op.name not in roles.whole or not isinstance(choice, Split)

    return Constraint("sequence parallel", allows=allows)


def _sequence(graph: Graph, signatures: Mapping[str, Signature], roles: Roles) -> dict[str, Names]:
    """Return the identifiers along the sequence, by operation outside of pairs.

    The sequence is the first dim of what columns read that is neither contracted nor the batch, with all that follows
    from it.
    """
    batch = reach(graph, signatures, TWO, batch_states(graph, DP, TWO, 1)) if batch_of(graph) >= TWO else {}
    states: dict[str, State] = {}
    for op in graph.operations:
        bound = signatures[op.name].bound
        if op.name not in roles.columns or bound is None:
            continue
        taken = {split.identifier for split in batch.get(op.name, ())}
        weights = {
            i
            for name, operand in zip(op.inputs, bound.inputs, strict=True)
            if operand is not None and graph.tensors[name].role == "parameter"
            for i in operand.identifiers()
        }
        free = frozenset(signatures[op.name].identifiers) - taken - weights
        for name, operand in zip(op.inputs, bound.inputs, strict=True):
            for dim, found in enumerate(operand.dims if operand is not None else ()):
                if name not in states and free.intersection(f.identifier for f in found.factors):
                    states[name] = Sharded(dim, 1, (), () if found.size % TWO == 0 else balanced(found.size, TWO))
    outside = graph.replace(operations=tuple(op for op in graph.operations if op.name in roles.whole))
    found_splits = reach(outside, signatures, TWO, states)
    return {name: frozenset(split.identifier for split in splits) for name, splits in found_splits.items() if splits}


# The role of each operation in Megatron's tensor parallelism, from annotations and the layers of a model.
# The columns and rows are those of Shoeybi et al., "Megatron-LM" (2019): in a layer, a weight that reads the residual
# stream is cut by its outputs, the next one by its inputs, and one sum puts the stream together again.

Names = frozenset[str]


@dataclass(frozen=True)
class Roles:
    """Roles of operations. All that are not named lie inside of pairs, or need no gradient.

    cut       by operation, the identifiers one of which is split: outputs of columns, inputs of rows (or those both
              share, such as experts), rows of vocabularies
    columns   those of `cut` that are the first of a pair
    whole     operations outside of pairs that need a gradient: norms, the residual stream, single weights
    """

    cut: Mapping[str, Names]
    columns: Names
    whole: Names


@dataclass(frozen=True, slots=True)
class _Weight:
    """An operation that contracts an input with a parameter.

    made         identifiers of the parameter that the output has, and no other input
    contracted   identifiers of the parameter that are contracted
    shared       identifiers that input, parameter and output share
    size         columns of the parameter: the product of the sizes of its dims that only the output has
    read         slot of the input that has most of `contracted`
    """

    made: Names
    contracted: Names
    shared: Names
    size: int
    read: int


def roles_of(graph: Graph, signatures: Mapping[str, Signature]) -> Roles:
    """Return the roles of all operations. Models without numbered layers are one layer."""
    weights = {op.name: w for op in graph.operations if (w := _weight(graph, op, signatures[op.name])) is not None}
    layer = {name: i for i, found in enumerate(layers_of(graph)) for name in found.operations}
    inside = frozenset(layer) or frozenset(op.name for op in graph.operations)
    handed = frozenset(
        op.name
        for op in graph.operations
        for name in op.outputs
        if name is not None and any(layer.get(user.name) != layer.get(op.name) for user, _ in graph.consumers[name])
    )
    columns = frozenset(n for n, w in weights.items() if n in inside and w.made)
    paired: set[str] = set()
    for op, reached in _flow(graph, signatures, weights, columns, handed):
        if op.name in weights and op.name in inside and weights[op.name].contracted:
            paired |= reached
    return _roles(graph, signatures, weights, frozenset(paired), inside, handed)


def _roles(
    graph: Graph,
    signatures: Mapping[str, Signature],
    weights: Mapping[str, _Weight],
    columns: Names,
    inside: Names,
    handed: Names,
) -> Roles:
    cut: dict[str, Names] = {}
    whole: set[str] = set()
    layers = [i for i, op in enumerate(graph.operations) if op.name in inside]
    after = graph.operations[layers[-1] + 1 :]
    heads = frozenset(op.name for op in after if op.name in weights and _is_tall(weights[op.name], signatures[op.name]))
    fed = _from_inputs(graph)
    for op, reached in _flow(graph, signatures, weights, columns | heads, handed):
        rows = _table(graph, op, signatures[op.name]) if op.name not in inside and fed.intersection(op.inputs) else None
        weight = weights.get(op.name)
        if weight is not None and reached and op.name in inside:
            cut[op.name] = weight.contracted | weight.shared
        elif op.name in columns or op.name in heads:
            assert weight is not None
            cut[op.name] = weight.made
        elif rows is not None:
            cut[op.name] = frozenset((rows,))
        elif (not reached or op.name in handed) and _needs_gradient(graph, op):
            whole.add(op.name)
    return Roles(cut, columns, frozenset(whole))


def _flow(
    graph: Graph,
    signatures: Mapping[str, Signature],
    weights: Mapping[str, _Weight],
    columns: Names,
    handed: Names,
) -> list[tuple[Operation, Names]]:
    """Return every operation with the columns whose cut outputs reach it.

    They pass through all operations but rows, what is handed from layer to layer, and norms over the cut dim.
    """
    cut: dict[str, Names] = {}
    found: list[tuple[Operation, Names]] = []
    for op in graph.operations:
        weight = weights.get(op.name)
        read = op.inputs if weight is None else (op.inputs[weight.read],)
        reached: Names = frozenset().union(*(cut.get(name, frozenset()) for name in read))
        over = _normalises(graph, op, signatures[op.name])
        if over is not None:
            reached = frozenset(name for name in reached if weights[name].size != over)
        found.append((op, reached))
        if weight is not None and reached:
            after = reached if weight.shared else frozenset()
        else:
            after = reached | ({op.name} & columns)
        if op.name not in handed:
            cut.update((name, after) for name in op.outputs if name is not None)
    return found


def _weight(graph: Graph, op: Operation, signature: Signature) -> _Weight | None:
    """Return the contraction of an identifier of a parameter with an input; None where the operation makes none."""
    bound = signature.bound
    if bound is None or not signature.flops:
        return None
    used = [frozenset(() if o is None else o.identifiers()) for o in bound.inputs]
    made = frozenset(i for o in bound.outputs if o is not None for i in o.identifiers())
    may = frozenset(signature.identifiers)
    data = [slot for slot in range(len(op.inputs)) if not _is_parameter(graph, op, slot)]
    for slot in range(len(op.inputs)):
        others: Names = frozenset().union(*(used[i] for i in data if i != slot))
        contracted = (used[slot] & others) - made
        if slot not in data and contracted:
            alone = (used[slot] & made) - others
            read = max(data, key=lambda i: (len(used[i] & contracted), -i))
            shared = used[slot] & used[read] & made
            return _Weight(alone & may, contracted & may, shared & may, prod(bound.sizes[i] for i in alone), read)
    return None


def _table(graph: Graph, op: Operation, signature: Signature) -> str | None:
    """Return the identifier of the rows of a table that is looked up, where they are more than its columns; else
    None."""
    bound = signature.bound
    if bound is None or signature.flops or len(op.inputs) != 2 or not _is_parameter(graph, op, 0):
        return None
    table, others = bound.inputs[0], (*bound.inputs[1:], *bound.outputs)
    if table is None or len(table.shape) != 2 or table.shape[0] < table.shape[1]:
        return None
    rows = [f.identifier for f in table.dims[0].factors]
    read = {i for o in others if o is not None for i in o.identifiers()}
    return rows[0] if len(rows) == 1 and rows[0] in signature.identifiers and rows[0] not in read else None


def _is_tall(weight: _Weight, signature: Signature) -> bool:
    """Return whether a weight makes at least as many numbers as it reads: a vocabulary, not a class or a score."""
    assert signature.bound is not None
    return bool(weight.made) and weight.size >= prod(signature.bound.sizes[i] for i in weight.contracted)


def _normalises(graph: Graph, op: Operation, signature: Signature) -> int | None:
    """Return the size of the frozen dims that a parameter scales: those of a norm; None for other operations."""
    bound = signature.bound
    if bound is None or signature.flops:
        return None
    for slot, operand in enumerate(bound.inputs):
        if operand is not None and _is_parameter(graph, op, slot) and operand.dims:
            return None if set(operand.identifiers()) & set(signature.identifiers) else prod(operand.shape)
    return None


def _from_inputs(graph: Graph) -> Names:
    """Return the tensors without gradient that come from the inputs alone: tokens, not positions."""
    found = {t.name for t in graph.with_role("input")}
    for op in graph.operations:
        if not _needs_gradient(graph, op) and found.intersection(op.inputs):
            found.update(name for name in op.outputs if name is not None)
    return frozenset(found)


def _is_parameter(graph: Graph, op: Operation, slot: int) -> bool:
    return graph.tensors[op.inputs[slot]].role == "parameter"


def _needs_gradient(graph: Graph, op: Operation) -> bool:
    return any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None)
