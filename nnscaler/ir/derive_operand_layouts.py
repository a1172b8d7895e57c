"""Derive the layout of every operand from an operation's choice on an axis, and the choice back, by its annotation.

Under `Split(identifier, outer)` an operand that has the identifier is sharded; an input that lacks it is
`Replicated` (its gradient is a partial sum), or `Partial` when it enters additively; an output that lacks it is a
`Partial` (reduction identifiers only).

Where the split has a `circulating` identifier, an input that lacks the first and has this one is sharded along it, and
so is its gradient: the operator passes such shards around the axis and adds to their gradients on the way.

No operator has layouts that are written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundDim, BoundOperand, Factor
from op_registry.annotation.splits import balanced, explain_sizes, shard_of, splittable
from op_registry.call import AxisShard

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Layout, Partial, Prefix, Sharded, State, without_gradient


def operand_state(bound: BoundAnnotation, operand: BoundOperand | None, split: Split) -> Sharded | None:
    """Return how a legal split shards the operand; None if the operand lacks the identifier, and only then."""
    if operand is None:
        return None
    found = shard_of(bound, operand, split.identifier, split.outer, split.sizes, split.sections)
    if found is None and split.circulating:
        found = shard_of(bound, operand, split.circulating, split.outer, split.sizes)
    return None if found is None else Sharded(found.dim, found.outer, found.sections, found.sizes)


def circulating_slots(signature: Signature, choice: Choice) -> tuple[int, ...]:
    """Return the input slots whose shards are passed around the axis under this choice."""
    if not isinstance(choice, Split) or not choice.circulating or signature.bound is None:
        return ()
    found = enumerate(signature.bound.inputs)
    own, second = choice.identifier, choice.circulating
    return tuple(i for i, o in found if o is not None and own not in o.identifiers() and second in o.identifiers())


def around_axis(signature: Signature, choice: Split) -> Split | None:
    """Return the choice with what circulates under it; None where the operator passes nothing around."""
    second = dict(signature.spec.circulates).get(choice.identifier) if signature.spec is not None else None
    known = second is not None and signature.bound is not None and second in signature.bound.sizes
    return replace(choice, circulating=second or "") if known else None


def _prefix_state(bound: BoundAnnotation, operand: BoundOperand | None, split: Split) -> Prefix | None:
    """Return the state of an operand that is read up to the rows of a slice; None for any other one."""
    if operand is None or not split.prefix:
        return None
    dims = (tuple(f.identifier for f in dim.factors) for dim in operand.dims)
    read = (i for i, names in enumerate(dims) if any(n and bound.rows.get(n) == split.identifier for n in names))
    dim = next(read, None)
    return None if dim is None else Prefix(dim, split.sizes)


def input_states(signature: Signature, choice: Choice) -> tuple[State, ...]:
    """Return the state that each input slot needs on an axis with this choice."""
    found: tuple[State, ...] | None = signature.memo.get(("inputs", choice))
    if found is None:
        found = signature.memo["inputs", choice] = _input_states(signature, choice)
    return found


def _input_states(signature: Signature, choice: Choice) -> tuple[State, ...]:
    count = signature.inputs
    match choice:
        case RunInvariant():
            return (INVARIANT,) * count
        case RunReplicated():
            return (REPLICATED,) * count
        case RunPartial(slots):
            return tuple(PARTIAL if i in slots else REPLICATED for i in range(count))
    bound = signature.bound
    assert bound is not None and isinstance(choice, Split)
    reduction = bound.marks.get(choice.identifier) == "+"
    states: list[State] = []
    for operand in bound.inputs:
        state = _prefix_state(bound, operand, choice) or operand_state(bound, operand, choice)
        if state is not None:
            states.append(state)
        elif operand is not None and operand.additive and reduction:
            states.append(PARTIAL)
        else:
            states.append(REPLICATED)
    return tuple(states)


def output_states(signature: Signature, choice: Choice, count: int) -> tuple[State, ...]:
    """Return the state in which each output arises on an axis with this choice."""
    found: tuple[State, ...] | None = signature.memo.get(("outputs", choice, count))
    if found is None:
        found = signature.memo["outputs", choice, count] = _output_states(signature, choice, count)
    return found


def _output_states(signature: Signature, choice: Choice, count: int) -> tuple[State, ...]:
    match choice:
        case RunInvariant():
            return (INVARIANT,) * count
        case RunReplicated():
            return (REPLICATED,) * count
        case RunPartial():
            return (PARTIAL,) * count
    bound = signature.bound
    assert bound is not None and isinstance(choice, Split)
    states: list[State] = []
    for operand in bound.outputs:
        state = _prefix_state(bound, operand, choice) or operand_state(bound, operand, choice)
        if state is not None:
            states.append(state)
        elif bound.marks.get(choice.identifier) == "+" and operand is not None:
            states.append(Partial(bound.reductions.get(choice.identifier, "sum")))
        else:
            states.append(REPLICATED)
    return tuple(states)


def input_layouts(graph: Graph, op: Operation, signature: Signature, choices: Sequence[Choice]) -> tuple[Layout, ...]:
    """Return the layout that each input slot needs, canonical for tensors without gradient."""
    per_axis = [input_states(signature, c) for c in choices]
    layouts: list[Layout] = []
    for slot, name in enumerate(op.inputs):
        layout = tuple(states[slot] for states in per_axis)
        layouts.append(layout if graph.tensors[name].needs_grad else without_gradient(layout))
    return tuple(layouts)


def output_layouts(graph: Graph, op: Operation, signature: Signature, choices: Sequence[Choice]) -> tuple[Layout, ...]:
    """Return the layout in which each output arises, canonical for tensors without gradient."""
    per_axis = [output_states(signature, c, len(op.outputs)) for c in choices]
    layouts: list[Layout] = []
    for index, name in enumerate(op.outputs):
        layout = tuple(states[index] for states in per_axis)
        layouts.append(layout if name and graph.tensors[name].needs_grad else without_gradient(layout))
    return tuple(layouts)


def shards_of(
    signature: Signature, choices: Sequence[Choice], axes: Sequence[tuple[str, int]]
) -> dict[str, tuple[AxisShard, ...]]:
    """identifier -> the axes that split it, for `localize`."""
    result: dict[str, tuple[AxisShard, ...]] = {}
    for choice, (axis, parts) in zip(choices, axes, strict=True):
        if isinstance(choice, Split) and signature.bound is not None:
            around = (choice.circulating,) if choice.circulating else ()
            own = choice.prefix and signature.bound.rows.get(choice.identifier) == choice.identifier
            shard = AxisShard(axis, parts, choice.outer, choice.sizes, choice.sections, bool(around), own)
            for identifier in (*signature.bound.tied.get(choice.identifier, (choice.identifier,)), *around):
                result[identifier] = (*result.get(identifier, ()), shard)
    return result


def explain_illegal_choice(signature: Signature, choice: Choice, parts: int) -> str | None:
    """Say why this choice on an axis of `parts` is illegal by itself; None if it is legal."""
    if isinstance(choice, RunInvariant | RunReplicated):
        return None
    key = ("illegal", choice, parts)
    if key not in signature.memo:
        signature.memo[key] = _explain_illegal_choice(signature, choice, parts)
    reason: str | None = signature.memo[key]
    return reason


def _explain_illegal_choice(signature: Signature, choice: Split | RunPartial, parts: int) -> str | None:
    if signature.bound is None or signature.spec is None:
        return signature.reason or "the operator has no annotation"
    if isinstance(choice, RunPartial):
        return None if choice.slots in signature.linear else f"not linear in operands {sorted(choice.slots)}"
    if choice.identifier not in signature.bound.sizes:
        return f"`{signature.bound.text}` has no identifier {choice.identifier!r}"
    if choice.sizes and not signature.spec.allows_uneven:
        return f"the hook of {signature.spec.name} does not know shards of unequal sizes"
    if choice.circulating:
        reason = _explain_circulating(signature, choice, parts)
        if reason:
            return reason
    elif (choice.outer > 1 or choice.sections) and choice.identifier in signature.spec.contiguous:
        return f"{choice.identifier!r} can only be split into contiguous blocks"
    whole = choice.outer == 1 and not choice.sections and not choice.circulating
    if choice.prefix and not (whole and reads_prefix(signature, choice.identifier)):
        return f"`{signature.bound.text}` has nothing that is read up to a block of {choice.identifier!r}"
    cut = (choice.outer, choice.sizes, choice.sections)
    return splittable(signature.bound, choice.identifier, parts, *cut, choice.prefix)


def reads_prefix(signature: Signature, identifier: str) -> bool:
    """Return whether an operand is read up to the rows of an identifier, as its mark says: `s<q`."""
    return signature.bound is not None and identifier in signature.bound.rows.values()


def over_slices(signature: Signature, split: Split) -> Split:
    """Return the split as slices in time take it: what is read up to a row is a prefix."""
    return replace(split, prefix=True) if reads_prefix(signature, split.identifier) else split


def _explain_circulating(signature: Signature, choice: Split, parts: int) -> str | None:
    """Say why what circulates cannot be split as the identifier is; None if it can."""
    allowed = around_axis(signature, choice)
    second = choice.circulating
    if allowed != choice or signature.bound is None:
        return f"{second!r} does not circulate while {choice.identifier!r} is split"
    size = signature.bound.sizes[second]
    if choice.sections:
        return f"{second!r} circulates in blocks, not in sections"
    if choice.sizes:
        return explain_sizes(choice.sizes, parts, choice.outer, size)
    if size % (choice.outer * parts):
        return f"{second!r} has size {size}, which does not divide by {choice.outer} x {parts}"
    return None


def explain_illegal_choices(
    graph: Graph, op: Operation, signature: Signature, choices: Sequence[Choice], axes: Sequence[tuple[str, int]]
) -> str | None:
    """Say why these choices, one per axis, cannot be made together; None if they can."""
    tensors = tuple(None if name is None else graph.tensors[name] for name in (*op.inputs, *op.outputs))
    described = tuple(None if t is None else (t.shape, t.needs_grad) for t in tensors)
    key = ("together", tuple(choices), tuple(axes), described)
    if key not in signature.memo:
        signature.memo[key] = _explain_together(graph, op, signature, choices, axes)
    found: tuple[int | None, str] | None = signature.memo[key]
    if found is None:
        return None
    number, reason = found
    tensor = None if number is None else tensors[number]
    return reason if tensor is None else f"tensor {tensor.name}: {reason}"


def _explain_together(
    graph: Graph, op: Operation, signature: Signature, choices: Sequence[Choice], axes: Sequence[tuple[str, int]]
) -> tuple[int | None, str] | None:
    """Return the operand that the reason is about (inputs, then outputs), and the reason."""
    sizes = [parts for _, parts in axes]
    split_by: dict[str, int] = {}
    splits = [choice for choice in choices if isinstance(choice, Split)]
    around = next((choice.circulating for choice in splits if choice.circulating), None)
    sliced = next((choice.identifier for choice in splits if choice.prefix), None)
    if around is not None and sliced is not None:
        return None, f"{around!r} circulates, and {sliced!r} is cut into slices, which have a part of what circulates"
    for choice, (axis, parts) in zip(choices, axes, strict=True):
        reason = explain_illegal_choice(signature, choice, parts)
        if reason:
            return None, f"{choice} over {axis}: {reason}"
        if isinstance(choice, Split):
            split_by[choice.identifier] = split_by.get(choice.identifier, 0) + 1
    if signature.spec is not None:
        for identifier in signature.spec.contiguous:
            if split_by.get(identifier, 0) > 1:
                return None, f"{identifier!r} can be split by one axis only"
    every = (
        *zip(op.inputs, input_layouts(graph, op, signature, choices), strict=True),
        *zip(op.outputs, output_layouts(graph, op, signature, choices), strict=True),
    )
    for number, (name, layout) in enumerate(every):
        if name is None:
            continue
        tensor = graph.tensors[name]
        reason = explain_illegal(layout, sizes, tensor.shape)
        if reason:
            return number, reason
        if tensor.needs_grad and any(isinstance(s, Partial) and s.reduction != "sum" for s in layout):
            return number, "a partial max has no gradient"
    return None


def resolve(operand: BoundOperand | None, state: State, parts: int) -> Split | None:
    """Return the split that gives this operand that sharded state: the inverse of `operand_state`.

    None when the state straddles factors or falls on a literal: the operand then has to be converted.
    """
    if operand is None or not isinstance(state, Sharded) or state.dim >= len(operand.dims):
        return None
    dim = operand.dims[state.dim]
    if state.sections:
        if dim.concat:
            same = tuple(f.size for f in dim.factors) == state.sections
            return Split(dim.factors[0].identifier) if same and dim.factors[0].identifier else None
        only = dim.factors[0] if len(dim.factors) == 1 else None
        return Split(only.identifier, 1, state.sections) if only is not None and only.identifier else None
    if dim.concat:
        return None
    before = 1
    for factor in dim.factors:
        if state.outer % before:
            return None
        outer = state.outer // before
        if state.sizes:
            split = _uneven(dim, factor, before, outer, state.sizes)
            if split is not None:
                return split
        elif outer < factor.size and factor.size % (outer * parts) == 0:
            return Split(factor.identifier, outer) if factor.identifier else None
        before *= factor.size
    return None


def _uneven(dim: BoundDim, factor: Factor, before: int, outer: int, sizes: tuple[int, ...]) -> Split | None:
    """Return the split of a factor of a dim whose blocks are cut into `sizes`: whole numbers of what lies inside of
    it."""
    after = dim.size // (before * factor.size)
    fits = factor.identifier is not None and outer < factor.size and factor.size * after == sum(sizes) * outer
    if not fits or any(size % after for size in sizes):
        return None
    return Split(factor.identifier or "", outer, (), tuple(size // after for size in sizes))


def even_or_balanced(signature: Signature, identifier: str, parts: int) -> Split:
    """Return the split into equal shards, or, where the identifier's size does not divide, into sizes that differ by
    one."""
    size = signature.bound.sizes.get(identifier, 0) if signature.bound is not None else 0
    return Split(identifier, sizes=balanced(size, parts))


def is_legal(signature: Signature, choice: Choice, parts: int) -> bool:
    return explain_illegal_choice(signature, choice, parts) is None
