"""Constraints that are policies: how Megatron divides layers over tp."""

from __future__ import annotations

from collections.abc import Mapping

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice, Split
from nnscaler.planning.constraints.kinds import Constraint
from nnscaler.planning.constraints.roles import roles_of
from nnscaler.transform.signature import Signature


def megatron(graph: Graph, signatures: Mapping[str, Signature]) -> Constraint:
    """Pairs of weights in layers are cut by outputs, then by inputs; vocabularies by their rows; norms, the residual
    stream and single weights are whole. What lies inside of a pair is free."""
    roles = roles_of(graph, signatures)

    def allows(op: Operation, choice: Choice) -> bool:
        if op.name in roles.cut:
            return isinstance(choice, Split) and choice.identifier in roles.cut[op.name]
        return op.name not in roles.whole or not isinstance(choice, Split)

    return Constraint("megatron", allows=allows)
