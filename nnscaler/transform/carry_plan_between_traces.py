"""Carry a plan of one trace of a model to another trace: for batches of other sizes, or the other mode.

Two things in a plan are of one graph. Names count its operators: where a mode adds or leaves out one (stochastic depth
in training), `add_8` is another operation after it. What tells operations apart in both graphs is their name without
its count, their operator, their module and their line, and the order of those that share these; then less of it, and,
where a mode has another operator, the name that its line and module give its result. And the blocks of which a dim is
made may be the samples: where a rank has half of the windows of each, a dim of (samples x windows) has as many blocks
as samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from op_registry.annotation.bind_sizes import BoundAnnotation

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import even_or_balanced, is_legal
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Split
from nnscaler.layout import MICRO
from nnscaler.transform.plan import ChunkStep, OrderStep, Plan, RestStep, SplitStep, Step
from nnscaler.transform.select_operations import select

Signatures = Mapping[str, Signature]
_COUNT = re.compile(r"_\d+(?=_|$)")  # in a name: which of its kind it is
_KEYS: tuple[Callable[[Operation], Hashable], ...] = (
    # a mode may take an operator apart: attention with dropout transposes its keys, beside what the line transposes
    lambda op: (_COUNT.sub("", op.name), op.operator, op.module, op.where),
    lambda op: (op.operator, op.module, op.where),
    lambda op: (op.operator, op.module),  # a mode may have a line of its own
    lambda op: (op.name, op.module, op.where),  # or an operator: batch norm has other statistics in evaluation
)


def carry(plan: Plan, before: Graph, after: Graph) -> Plan:
    """Return the plan of the graph `before` for the graph `after` of the same model: each step with what it names
    there and with as many blocks as there are; less what cannot be there."""
    names = counterparts(before, after)
    known = signatures(before), signatures(after)
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, RestStep):
            steps.append(step)
        elif isinstance(step, OrderStep):
            first, second = (_carried(after, patterns, names) for patterns in (step.first, step.second))
            steps += [OrderStep(first, second)] if first and second else []
        elif isinstance(step, SplitStep):
            steps += _resized(step, [op.name for op in select(before, step.operations)], names, known, plan)
        elif isinstance(step, ChunkStep):
            pattern, named_by, identifier = step.identifier.rpartition(":")
            anchor = _carried(after, (pattern,), names) if named_by else ("",)
            if (named := _carried(after, step.operations, names)) and anchor:
                steps.append(replace(step, operations=named, identifier=f"{anchor[0]}{named_by}{identifier}"))
        elif named := _carried(after, step.operations, names):
            steps.append(replace(step, operations=named))
    return replace(plan, steps=tuple(steps))


def counterparts(before: Graph, after: Graph) -> dict[str, str | None]:
    """Return, of each operation of `before`, the name of the one that it is in `after`; None where there is none."""
    found: dict[str, str | None] = {op.name: None for op in before.operations}
    left, free = list(before.operations), list(after.operations)
    for key in _KEYS:
        waiting: dict[Hashable, list[Operation]] = {}
        for op in reversed(free):
            waiting.setdefault(key(op), []).append(op)
        for op in left:
            if same := waiting.get(key(op)):
                found[op.name] = same.pop().name
        taken = set(found.values())
        left = [op for op in left if found[op.name] is None]
        free = [op for op in free if op.name not in taken]
    return found


def _carried(after: Graph, patterns: Sequence[str], names: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return names and patterns of the one graph as they are in the other, less those that name nothing there."""
    carried: list[str] = []
    for pattern in patterns:
        name = names.get(pattern, pattern)
        if name is not None:
            with suppress(NnscalerError):
                carried += [name] if select(after, [name]) else []
    return tuple(carried)


def _shaped(step: SplitStep) -> bool:
    """Return whether the split says more than which identifier is cut: something of its size."""
    return step.outer > 1 or bool(step.sizes or step.sections)


def _resized(
    step: SplitStep,
    operations: Sequence[str],
    names: Mapping[str, str | None],
    known: tuple[Signatures, Signatures],
    plan: Plan,
) -> list[Step]:
    """Return the split of these operations as it is at their other sizes: a step for each form and name that it takes.

    An operation of another size, or with another operator, that cannot be cut so follows its operands instead.
    """
    parts = {size for axes in plan.mesh_axes for name, size in axes if name == step.axis}
    parts = {plan.micro_batches} if step.axis == MICRO else parts
    forms: dict[SplitStep, list[str]] = {}
    for operation in operations:
        name = names[operation]
        if name is None:
            continue
        before, after = known[0][operation], known[1][name]
        identifier = _identifier(before, after, step.identifier)
        if before.bound is None or after.bound is None or identifier is None:
            continue
        old, new = before.bound.sizes[step.identifier], after.bound.sizes[identifier]
        named = replace(step, identifier=identifier)
        form = named if old == new else _of_size(named, old, new)
        alike = old == new and before.call.operator == after.call.operator
        if alike or all(_is_legal(form, after, n) for n in parts):
            forms.setdefault(form, []).append(name)
    return [replace(form, operations=tuple(found)) for form, found in forms.items()]


def _identifier(before: Signature, after: Signature, identifier: str) -> str | None:
    """Return what the identifier of one call is named in the other, by where it stands: a dim of size 1 may have no
    name there, and those after it other ones. None where none stands there."""
    old, new = ({} if signature.bound is None else _places(signature.bound) for signature in (before, after))
    return next((new[place] for place, name in old.items() if name == identifier and place in new), None)


def _places(bound: BoundAnnotation) -> dict[tuple[int, ...], str]:
    """Return the identifiers by operand, dim, and place among as many factors."""
    return {
        (number, dim, len(bound_dim.factors), place): factor.identifier
        for number, operand in enumerate((*bound.inputs, *bound.outputs))
        for dim, bound_dim in enumerate(operand.dims if operand else ())
        for place, factor in enumerate(bound_dim.factors)
        if factor.identifier is not None
    }


def _is_legal(step: SplitStep, signature: Signature, parts: int) -> bool:
    split = Split(step.identifier, step.outer, step.sections, step.sizes, step.circulating)
    if not _shaped(step):
        split = replace(split, sizes=even_or_balanced(signature, step.identifier, parts).sizes)
    return is_legal(signature, split, parts)


def _of_size(step: SplitStep, old: int, new: int) -> SplitStep:
    """Return the split of an identifier of another size: with blocks of the same size where these fill it, since the
    samples are the outermost factor of a dim; else with as many blocks, in equal parts."""
    block = old // step.outer
    if step.outer > 1 and new % block == 0:
        return replace(step, outer=new // block)
    return replace(step, sizes=())
