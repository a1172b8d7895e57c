"""Constraints that are policies: Megatron's division of layers over tp, and sequence parallelism between its pairs."""

from __future__ import annotations

from collections.abc import Mapping

from op_registry.annotation.splits import balanced

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Choice, Split
from nnscaler.layout import Sharded, State
from nnscaler.planning.constraints.kinds import Constraint
from nnscaler.planning.constraints.megatron_roles import Names, Roles, roles_of
from nnscaler.transform.complete_plan import batch_of, batch_states
from nnscaler.transform.plan import DP
from nnscaler.transform.split_candidates import reach

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
