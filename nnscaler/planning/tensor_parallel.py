"""Tensor parallelism from annotations alone: the legal choice per operation with the least work and communication.

From the cost of compute, memory traffic, parameter memory and communicated elements, `search` finds the column/row
pattern of an MLP and head-parallel attention by itself, through views and packed projections; nothing looks at
parameter names.

Splits that the dims of the inputs reach (batch, sequence) are left to other axes. Unequal shards serve where a size
does not divide; operations that no parameter reaches are small, and not worth them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from op_registry.annotation.splits import balanced

from nnscaler.ir.derive import explain_illegal_choices
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.layout import Sharded
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, Split
from nnscaler.ir.signature import Signature
from nnscaler.planning.beam_search import cheapest_choices
from nnscaler.transform.candidates import all_candidates, reach
from nnscaler.transform.plan import ReplicateStep, SplitStep, Step


def tensor_parallel(
    graph: Graph,
    signatures: Mapping[str, Signature],
    axis: str,
    parts: int,
    whole: Collection[str] = (),
    made: Mapping[str, tuple[Choice, ...]] | None = None,
    axes: Sequence[tuple[str, int]] = (),
) -> tuple[Step, ...]:
    """Return steps for every operation on `axis`.

    Operations in `whole` are replicated. `made`: the choices on other axes, with which the new ones must be legal
    together.
    """
    candidates = _options(graph, signatures, parts, whole)
    every = (*axes, (axis, parts))

    def together(op: Operation, choice: Choice) -> bool:
        if made is None or isinstance(choice, RunInvariant):
            return True
        return not explain_illegal_choices(graph, op, signatures[op.name], (*made[op.name], choice), every)

    options = {op.name: tuple(c for c in candidates[op.name] if together(op, c)) for op in graph.operations}
    return steps_of(graph, axis, cheapest_choices(graph, signatures, parts, options))


def _options(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, whole: Collection[str]
) -> dict[str, tuple[Choice, ...]]:
    """Return the choices to compare, whole first: it wins ties."""
    candidates = all_candidates(graph, signatures, parts)
    taken: dict[str, set[Split]] = {op.name: set() for op in graph.operations}
    inputs = graph.with_role("input")
    for dim in range(max((len(tensor.shape) for tensor in inputs), default=0)):
        carried = [t for t in inputs if dim < len(t.shape) and t.shape[dim] >= parts]
        states = {t.name: Sharded(dim, 1, (), balanced(t.shape[dim], parts)) for t in carried}
        for name, found in reach(graph, signatures, parts, states).items():
            taken[name].update(found)
    result: dict[str, tuple[Choice, ...]] = {}
    for op in graph.operations:
        choices: list[Choice] = [RunInvariant()]
        if op.name not in whole:
            dims = {c.identifier for c in taken[op.name]}  # which other axes may cut in other places, when unevenly
            trained = any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None)
            left = (c for c in candidates[op.name] if c not in taken[op.name])
            choices += [c for c in left if not c.sizes or (trained and c.identifier not in dims)]
            choices += [RunPartial(slots) for slots in signatures[op.name].linear]
        result[op.name] = tuple(choices)
    return result


def steps_of(graph: Graph, axis: str, choices: Mapping[str, Choice]) -> tuple[Step, ...]:
    """Return choices as plan steps, operations with the same choice of the same operator together."""
    groups: dict[tuple[str, Choice], list[str]] = {}
    for op in graph.operations:
        groups.setdefault((op.operator, choices[op.name]), []).append(op.name)
    return tuple(step_of(tuple(names), axis, choice) for (_, choice), names in groups.items())


def step_of(operations: tuple[str, ...], axis: str, choice: Choice) -> Step:
    """Return one choice as a plan step."""
    if isinstance(choice, Split):
        return SplitStep(operations, axis, choice.identifier, choice.outer, choice.sections, choice.sizes)
    if isinstance(choice, RunPartial):
        return ReplicateStep(operations, axis, partial=tuple(sorted(choice.slots)))
    return ReplicateStep(operations, axis, deferred=not isinstance(choice, RunInvariant))
