"""Complete the choices of all operations on one mesh: what the plan's steps say, and what follows from it.

Micro-batches come first, since they can communicate nothing, slices likewise, then the axes that the batch takes, then
the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd

from op_registry.annotation.splits import balanced

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import even_or_balanced, explain_illegal_choice
from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import MICRO, SLICE, Sharded, State
from nnscaler.transform.plan import Axes, Plan, ReplicateStep, SplitStep, slices_text
from nnscaler.transform.propagate_choices import FollowAxis, follow
from nnscaler.transform.select_operations import select

Choices = Mapping[str, tuple[Choice, ...]]  # operation -> one choice per axis


def choose(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, mesh: Axes, here: Collection[str]
) -> tuple[Choices, Axes]:
    """Return choices on every axis of a mesh and on micro-batches, and these axes in the order of the choices.

    Steps count for the operations in `here`, which run on the mesh; all others follow. Raises NnscalerError:
    plan_illegal, micro_batches_coupled.
    """
    choices, axes = follow_batch(graph, signatures, plan, mesh, here)
    for name, parts in mesh:
        if name not in plan.data_axes:
            explicit = _explicit(graph, signatures, plan, name, parts, here)
            made = follow(graph, signatures, FollowAxis(name, parts), {}, explicit, choices, axes)
            choices = {op: (*before, made[op]) for op, before in choices.items()}
            axes = (*axes, (name, parts))
    return choices, axes


def follow_batch(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, mesh: Axes, here: Collection[str] | None = None
) -> tuple[Choices, Axes]:
    """Choose as `choose`, on micro-batches and the data axes only. `here` None: every operation."""
    taken: dict[str, Mapping[str, State]] = {}
    outer = 1
    for name, parts in mesh:
        if name in plan.data_axes:
            taken[name] = batch_states(graph, name, parts, outer)
            outer *= parts
    in_time = {MICRO: batch_states(graph, MICRO, plan.micro_batches, plan.data_parts)}
    if plan.slices:
        in_time[SLICE] = slice_states(graph, plan.slices)
    taken = {**in_time, **taken}
    sizes = {**dict(mesh), MICRO: plan.micro_batches, SLICE: len(plan.slices)}
    choices: Choices = {op.name: () for op in graph.operations}
    axes: Axes = ()
    for name, inputs in taken.items():
        everywhere = None if name in in_time else here  # a micro-batch is the same on all meshes
        explicit = _explicit(graph, signatures, plan, name, sizes[name], everywhere)
        follow_axis = FollowAxis(name, sizes[name], name in in_time)
        made = follow(graph, signatures, follow_axis, inputs, explicit, choices, axes)
        choices = {op: (*before, made[op]) for op, before in choices.items()}
        axes = (*axes, (name, sizes[name]))
    return choices, axes


def batch_states(graph: Graph, axis: str, parts: int, outer: int) -> dict[str, State]:
    """Return the inputs that carry the batch, sharded along dim 0.

    The batch is dim 0 of the first input that has dims. One axis by itself may cut it unevenly; micro-batches are
    equal. Raises NnscalerError("plan_illegal") where the batch does not divide.
    """
    inputs = [t for t in graph.with_role("input") if t.shape]
    if not inputs or parts == 1:
        return {}
    batch = batch_of(graph)
    sizes = balanced(batch, parts) if outer == 1 and axis != MICRO else ()
    if batch % (outer * parts) and not sizes:
        what = "micro-batches" if axis == MICRO else axis
        uneven = outer == 1 and axis != MICRO  # then only a batch of fewer rows than parts comes here
        legal = [n for n in range(1, batch // outer + 1) if batch % (outer * n) == 0 or uneven]
        wrong = "has fewer rows than" if uneven else "does not divide by"
        raise NnscalerError(
            "plan_illegal",
            f"the batch of {batch} (input {inputs[0].name}) {wrong} {what}={parts}"
            + (f" after {outer} data-parallel parts" if outer > 1 else ""),
            help=f"legal: {what} in {legal}; or change the batch",
        )
    return {t.name: Sharded(0, outer, (), sizes) for t in inputs if t.shape[0] == batch}


def slice_states(graph: Graph, shares: Sequence[int]) -> dict[str, State]:
    """Return the inputs that carry tokens, sharded along dim 1 into slices of these shares.

    Raises NnscalerError("plan_illegal") where there is none, or the tokens do not divide.
    """
    carried, tokens = _carriers_of_tokens(graph), tokens_of(graph)
    if not carried:
        message = f"slices={slices_text(shares)}: no input of the model has tokens, dim 1 beside the batch"
        raise NnscalerError("plan_illegal", message, help="leave slices away, or use micro-batches (--micro-batches N)")
    each, rest = divmod(tokens, sum(shares))
    if rest:
        counts = [n for n in range(2, tokens + 1) if tokens % n == 0]
        raise NnscalerError(
            "plan_illegal",
            f"slices={slices_text(shares)}: the {tokens} tokens (dim 1 of input {carried[0].name}) do not divide into "
            f"{sum(shares)} shares",
            help=f"equal slices: {counts}; or lengths that add up to {tokens}, such as "
            f"slices={tokens - tokens // 2}:{tokens // 2}",
        )
    sizes = tuple(each * share for share in shares) if len(set(shares)) > 1 else ()
    return {t.name: Sharded(1, sizes=sizes) for t in carried if t.shape[1] == tokens}


def tokens_of(graph: Graph) -> int:
    """Return the tokens of a sample: dim 1 of the first input that has a batch and another dim; 0 if there is none."""
    return next((t.shape[1] for t in _carriers_of_tokens(graph)), 0)


def _carriers_of_tokens(graph: Graph) -> list[LogicalTensor]:
    batch = batch_of(graph)
    return [t for t in graph.with_role("input") if len(t.shape) > 1 and t.shape[0] == batch]


def batch_of(graph: Graph) -> int:
    """Return the samples in the global batch: dim 0 of the first input that has dims."""
    return next((t.shape[0] for t in graph.with_role("input") if t.shape), 1)


def largest_micro_batches(graph: Graph, wanted: int, data_parts: int) -> int:
    """Return the largest number of micro-batches up to `wanted` that divides each rank's batch."""
    local, rest = divmod(batch_of(graph), data_parts)
    if rest:
        return 1  # ranks have unequal parts of the batch
    return max((m for m in range(1, wanted + 1) if local % m == 0), default=gcd(wanted, max(local, 1)))


def _explicit(
    graph: Graph,
    signatures: Mapping[str, Signature],
    plan: Plan,
    axis: str,
    parts: int,
    here: Collection[str] | None,
) -> dict[str, Choice]:
    """Return the choices that the plan's steps make on an axis."""
    found: dict[str, Choice] = {}
    if parts == 1:
        return {op.name: RunInvariant() for op in graph.operations}
    for step in plan.steps:
        if isinstance(step, SplitStep | ReplicateStep) and step.axis == axis:
            for op in select(graph, step.operations):
                if here is None or op.name in here:
                    found[op.name] = _choice(step, op, signatures[op.name], parts)
    return found


def _choice(step: SplitStep | ReplicateStep, op: Operation, signature: Signature, parts: int) -> Choice:
    choice: Choice
    if isinstance(step, SplitStep):
        choice = Split(step.identifier, step.outer, step.sections, step.sizes, step.circulating)
        if choice == Split(step.identifier, circulating=step.circulating):
            choice = replace(choice, sizes=even_or_balanced(signature, step.identifier, parts).sizes)
    elif step.partial:
        choice = RunPartial(frozenset(step.partial))
    else:
        choice = RunReplicated() if step.deferred else RunInvariant()
    reason = explain_illegal_choice(signature, choice, parts)
    if isinstance(choice, Split) and choice.circulating and step.axis == MICRO:
        reason = f"the pieces of {MICRO} are moments, which cannot communicate {choice.circulating!r}"
    if reason:
        raise illegal(op, signature, f"{step.kind} of {op.name} over {step.axis}={parts}: {reason}", parts)
    return choice


def illegal(op: Operation, signature: Signature, message: str, parts: int) -> NnscalerError:
    """Return the error for a step that an operation's annotation forbids."""
    if signature.bound is None:
        help = f"register {op.operator} with nnscaler.register_op(annotation)"
        return NnscalerError("plan_illegal", message, where=op.where, help=help)
    splits = {i: even_or_balanced(signature, i, parts) for i in signature.identifiers}
    legal = [i for i, split in splits.items() if explain_illegal_choice(signature, split, parts) is None]
    return NnscalerError(
        "plan_illegal",
        f"{message} ({op.operator} is annotated `{signature.bound.text}`)",
        where=op.where,
        help=f"identifiers that {parts} parts may split: {', '.join(legal) or 'none'}; or replicate it",
    )
