"""A random legal choice for every operation: a plan that nobody would make, which must be right all the same.

Needs no policy, meets every row of the conversion table, and finds wrong annotations, hooks and conversions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from nnscaler.ir.graph import Graph
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, RunReplicated
from nnscaler.planning.tensor_parallel import step_of
from nnscaler.transform.candidates import all_candidates
from nnscaler.transform.plan import Plan, Step
from nnscaler.transform.rules import explain_illegal_choices
from nnscaler.transform.signature import Signature


def random_plan(
    graph: Graph, signatures: Mapping[str, Signature], mesh: Sequence[tuple[str, int]], seed: int
) -> Plan:
    """Every operation draws on every axis among whole, whole with deferred gradients, partial sums and splits."""
    random = Random(seed)
    candidates = {parts: all_candidates(graph, signatures, parts) for _, parts in mesh}
    steps: list[Step] = []
    for op in graph.operations:
        signature = signatures[op.name]
        made: tuple[Choice, ...] = ()
        for position, (axis, parts) in enumerate(mesh):
            choices: list[Choice] = [RunInvariant(), RunReplicated()]
            choices += [RunPartial(slots) for slots in signature.linear]
            choices += 2 * list(candidates[parts][op.name])
            random.shuffle(choices)
            for choice in choices:
                if explain_illegal_choices(graph, op, signature, (*made, choice), mesh[: position + 1]) is None:
                    made = (*made, choice)
                    break
            steps.append(step_of((op.name,), axis, made[-1]))
    return Plan(tuple(mesh), tuple(steps), data_axes=())
