"""Context and expert parallelism: tokens or experts are split over an axis. In the first, attention passes its keys and
values around.

The dim of the inputs that holds tokens is the one that reaches the rows of an attention through the annotations. All
else follows from it, as data parallelism follows from the batch dim. Where the order of tokens matters (a causal mask),
each rank has several blocks of the sequence, so that no rank has only late rows, which see most of the keys (striped
attention: Brandon et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from op_registry.annotation.splits import balanced
from op_registry.registry import facts_of

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import around_axis, explain_illegal_choice, input_states, is_legal
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Split
from nnscaler.layout import SLICE, Sharded, State
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import DP, EP, Axes, Plan, SplitStep
from nnscaler.transform.propagate_choices import Candidates, FollowAxis, follow, reach

BLOCKS = 8  # of the sequence on a rank, at most: the last rank then has an eighth more work than the average

LONG = 16384  # rows of attention, from which on the planner divides them

Signatures = Mapping[str, Signature]
Rings = Mapping[str, Split]  # by operation, how it passes its operands around


def context_parallel(
    graph: Graph,
    signatures: Signatures,
    axis: str,
    parts: int,
    made: Mapping[str, tuple[Choice, ...]],
    axes: Sequence[tuple[str, int]],
) -> tuple[Mapping[str, Choice], tuple[str, ...]]:
    """Return the choice of every operation on `axis`, and notes: which attentions gather their keys all the same.

    `made`: the choices on `axes`, with which the new ones must be legal together. Raises NnscalerError("plan_illegal")
    where the model has no attention that can pass its keys around, where its length cannot be divided, and where
    tokens are cut into slices in time as well.
    """
    slices = dict(axes).get(SLICE)
    if slices is not None:
        message = f"{axis}={parts} passes keys of all tokens around, and each of {slices} slices has a part of them"
        raise NnscalerError("plan_illegal", message, help=f"leave slices away, or {axis}: tp and dp go with slices")
    able = _able(graph, signatures, parts)
    dim = _token_dim(graph, signatures, parts, able)
    lengths = [_length(signatures[name], split.identifier) for name, split in able.items()]
    outer = _blocks(signatures, able, lengths, parts)
    rings = {name: _of_length(signatures[name], split, outer, parts) for name, split in able.items()}
    legal = {name: split for name, split in rings.items() if is_legal(signatures[name], split, parts)}
    if not legal:
        raise _indivisible(graph, signatures, rings, axis, parts)
    inputs = {
        t.name: Sharded(dim, outer, (), balanced(t.shape[dim], parts) if outer == 1 else ())
        for t in graph.with_role("input")
        if len(t.shape) > dim and t.shape[dim] % outer == 0 and t.shape[dim] >= outer * parts
    }
    choices = follow(graph, signatures, FollowAxis(axis, parts), inputs, legal, made, axes)
    notes = (
        f"{axis}: keys of {op.name} ({op.where}) are gathered, since its rows and columns are not cut alike"
        for op in graph.operations
        if op.name in rings and op.name not in legal
    )
    return choices, tuple(notes)


def contexts(graph: Graph, signatures: Signatures, ranks: int, permitted: Callable[[int], bool]) -> tuple[int, ...]:
    """Return how many ranks the planner lets share a sequence: 1, and where rows of attention are `LONG`, the powers of
    two that divide `ranks` and leave each rank a block; where constraints permit none of these, any number that they
    permit."""
    able = _rings(graph, signatures)
    longest = max((_length(signatures[name], split.identifier) for name, split in able.items()), default=0)
    twos = [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0 and longest % (BLOCKS * 2**i) == 0]
    found = tuple(twos) if longest >= LONG else (1,)
    if any(map(permitted, found)):
        return found
    return tuple(n for n in range(2, min(ranks, longest) + 1) if ranks % n == 0 and permitted(n)) or found


def _rings(graph: Graph, signatures: Signatures) -> Rings:
    """Return the operations that can pass operands around, and how."""
    found: dict[str, Split] = {}
    for op in graph.operations:
        signature = signatures[op.name]
        pairs = signature.spec.circulates if signature.spec is not None and signature.bound is not None else ()
        splits = (around_axis(signature, Split(first)) for first, _ in pairs if _has(signature, first))
        split = next((s for s in splits if s is not None), None)
        if split is not None:
            found[op.name] = split
    return found


def _has(signature: Signature, identifier: str) -> bool:
    return signature.bound is not None and identifier in signature.bound.sizes


def _able(graph: Graph, signatures: Signatures, parts: int) -> Rings:
    """Return the operations that can pass operands around. Raises NnscalerError where there is none."""
    found = _rings(graph, signatures)
    if found:
        return found
    specs = ((op, signatures[op.name]) for op in graph.operations)
    refused = next(((op, s.bound) for op, s in specs if s.spec is not None and s.spec.circulates), None)
    if refused is not None:
        op, bound = refused
        why = "" if bound is None else f": `{op.operator}` is annotated `{bound.text}` in this call"
        message = f"cp={parts}: no attention of the model can pass its keys around{why}"
        help = "attention with dropout draws from torch's generator: build the model with dropout 0, or drop cp"
        raise NnscalerError("plan_illegal", message, where=op.where, help=help)
    raise NnscalerError(
        "plan_illegal",
        f"cp={parts}: the model calls no attention whose keys can be passed around",
        help="call torch.nn.functional.scaled_dot_product_attention (in transformers: attn_implementation='sdpa') "
        "without dropout, which is drawn for all keys: build the model with dropout 0 in attention; or use tp or dp "
        "instead of cp",
    )


def _token_dim(graph: Graph, signatures: Signatures, parts: int, able: Rings) -> int:
    """Return the dim of the inputs that holds the rows of attention."""
    inputs = graph.with_role("input")
    for dim in range(1, max((len(t.shape) for t in inputs), default=0)):
        states = {
            t.name: Sharded(dim, 1, (), balanced(t.shape[dim], parts))
            for t in inputs
            if dim < len(t.shape) and t.shape[dim] >= parts
        }
        found = reach(graph, signatures, parts, states)
        if any(split.identifier == able[name].identifier for name in able for split in found[name]):
            return dim
    first = next(op for op in graph.operations if op.name in able)
    length = _length(signatures[first.name], able[first.name].identifier)
    shapes = ", ".join(f"{t.name} {list(t.shape)}" for t in inputs)
    raise NnscalerError(
        "plan_illegal",
        f"cp={parts}: no dim of the inputs after the first ({shapes}) reaches the {length} rows of {first.name} in "
        f"{parts} pieces",
        where=first.where,
        help=f"tokens are a dim of the inputs, of {parts} or more; or use tp or dp instead of cp",
    )


def _length(signature: Signature, identifier: str) -> int:
    assert signature.bound is not None
    return signature.bound.sizes[identifier]


def _blocks(signatures: Signatures, able: Rings, lengths: Sequence[int], parts: int) -> int:
    """Return how many blocks of the sequence each rank has; one where the order of rows does not matter."""
    specs = {name: signatures[name].spec for name in able}
    ordered = any(s is not None and able[name].identifier in s.contiguous for name, s in specs.items())
    options = range(BLOCKS, 1, -1) if ordered else ()
    return next((o for o in options if all(length % (o * parts) == 0 for length in lengths)), 1)


def _of_length(signature: Signature, split: Split, outer: int, parts: int) -> Split:
    sizes = balanced(_length(signature, split.identifier), parts) if outer == 1 else ()
    return Split(split.identifier, outer, (), sizes, split.circulating)


def _indivisible(graph: Graph, signatures: Signatures, rings: Rings, axis: str, parts: int) -> NnscalerError:
    op = next(op for op in graph.operations if op.name in rings)
    reason = explain_illegal_choice(signatures[op.name], rings[op.name], parts)
    return NnscalerError(
        "plan_illegal",
        f"{axis}={parts}: {op.name} cannot pass its keys around: {reason}",
        where=op.where,
        help=f"take a {axis} of which rows and columns have at least as many, or that divides both",
    )


# Expert parallelism: experts are divided among ranks that share the batch, and tokens travel between them.
# The axis `ep` lies inside of data parallelism. On it the batch is divided as on `dp`, and the operations that multiply
# by experts' weights split the dim in which experts are stacked. Everything else is a matter of layouts: what goes from
# tokens to experts is a conversion from `Sharded(batch)` to `Sharded(experts)`, an all_to_all where a model has
# dispatched its tokens into a buffer per expert (Lepikhin et al., GShard, 2020), and back; what a model hands to all
# experts, as one without dispatch does, is gathered.

STACKED = 3  # dims of a weight with one matrix per expert


@dataclass(frozen=True, slots=True)
class ExpertOperation:
    """An operation that multiplies by experts' weights, or that looks at them.

    operation    its name
    identifier   of its annotation: the dim in which experts are stacked
    experts      how many there are
    """

    operation: str
    identifier: str
    experts: int


def find_experts(graph: Graph, signatures: Mapping[str, Signature]) -> tuple[ExpertOperation, ...]:
    """Return the operations with experts' weights, in graph order; none for a model without experts.

    Experts are weights of three dims or more, stacked along one of which the model chooses: one that is as long as a
    dim along which integers are made of something trained (the best of a router's scores), and for each of whose places
    a product takes another matrix. Names say nothing here.
    """
    stacks, sizes = _stacked(graph), _chosen_from(graph, signatures)
    seeds = {op.name: _seeds(op, signatures[op.name], stacks, sizes) for op in graph.operations}
    reached = _reached(graph, signatures, 1, [(name, i) for name, found in seeds.items() for i in found])
    found: list[ExpertOperation] = []
    for op in graph.operations:
        bound = signatures[op.name].bound
        plain = [s.identifier for s in reached[op.name] if s == Split(s.identifier)]
        if plain and bound is not None and any(name in stacks for name in op.inputs):
            found.append(ExpertOperation(op.name, plain[0], bound.sizes[plain[0]]))
    return tuple(found)


def _reached(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, splits: Iterable[tuple[str, str]]
) -> Candidates:
    """Return, by operation, the splits that follow from those of these operations along these identifiers."""
    layouts: dict[str, State] = {}
    for name, identifier in splits:
        states = input_states(signatures[name], Split(identifier))
        pairs = zip(graph.by_name[name].inputs, states, strict=True)
        layouts.update((tensor, state) for tensor, state in pairs if isinstance(state, Sharded))
    return reach(graph, signatures, parts, layouts)


def batch_axes(sharing: int, ep: int) -> Axes:
    """Return the axes over which the batch is divided, in rank order: of `sharing` ranks, ep has the inner ones."""
    return tuple((name, size) for name, size in ((DP, sharing // ep), (EP, ep)) if size > 1)


def _stacked(graph: Graph) -> frozenset[str]:
    """Return the parameters of three dims or more, and views of them."""
    found = {t.name for t in graph.with_role("parameter") if len(t.shape) >= STACKED}
    for op in graph.operations:
        if facts_of(op.operator).view and op.inputs and op.inputs[0] in found:
            found.update(name for name in op.outputs if name is not None)
    return frozenset(found)


def _chosen_from(graph: Graph, signatures: Mapping[str, Signature]) -> frozenset[int]:
    """Return the lengths of the dims along which integers are made out of values that something trained has made.

    Such a dim is one that the operation cannot split. The values need no gradient themselves: scores may get a bias for
    the choice alone, or be detached before it.
    """
    trained = {t.name for t in graph.with_role("parameter") if t.needs_grad}
    found: set[int] = set()
    for op in graph.operations:
        made = [n for n in op.outputs if n is not None]
        read = trained.intersection(op.inputs)
        if read:
            trained.update(made)
        if read and any(graph.tensors[n].dtype in ("int64", "int32") for n in made):
            found.update(_whole(op, signatures[op.name], read))
    return frozenset(found)


def _whole(op: Operation, signature: Signature, names: Collection[str]) -> list[int]:
    """Return the lengths of the dims of these inputs that no choice splits."""
    if signature.bound is None:
        return []
    free = set(signature.identifiers)
    operands = [o for name, o in zip(op.inputs, signature.bound.inputs, strict=True) if o is not None and name in names]
    return [dim.size for o in operands for dim in o.dims if free.isdisjoint(f.identifier for f in dim.factors)]


def _seeds(op: Operation, signature: Signature, stacks: Collection[str], sizes: Collection[int]) -> list[str]:
    """Return the identifiers for each of whose places the operation takes another matrix out of a stack."""
    bound = signature.bound
    if bound is None or facts_of(op.operator).view:
        return []
    operands = [{f.identifier for dim in o.dims for f in dim.factors} if o is not None else set() for o in bound.inputs]
    out = {f.identifier for o in bound.outputs if o is not None for dim in o.dims for f in dim.factors}
    found: list[str] = []
    for slot, (name, own) in enumerate(zip(op.inputs, operands, strict=True)):
        if name not in stacks:
            continue
        others = set[str | None]().union(*(o for i, o in enumerate(operands) if i != slot))
        for identifier in signature.identifiers:
            met = identifier in others or identifier not in out
            rest = own - {identifier}
            matrix = any(i in others - out for i in rest) and any(i in out - others for i in rest)
            if identifier in own and bound.sizes[identifier] in sizes and met and matrix:
                found.append(identifier)
    return found


def expert_steps(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, mesh: Axes, parts: int
) -> tuple[SplitStep, ...]:
    """Return the steps that divide experts over the axis `ep` of `plan`, and leave all else to the batch.

    What reads the experts' results does so where its tokens are: an operation that would follow the experts' layout
    away from its batch is told not to. `mesh`: the axes of a pipeline device. Raises NnscalerError("plan_illegal") for
    a model without experts, and where they do not divide.
    """
    experts = find_experts(graph, signatures)
    if not experts:
        raise NnscalerError(
            "plan_illegal",
            f"ep={parts} divides experts, and this model has none: no router of it chooses among weights of {STACKED} "
            "dims",
            help="leave ep away: dp divides the batch, tp the operators; experts are stacked into one weight each, "
            "[experts, in, out], and chosen by topk or argmax",
        )
    for one in experts:
        if one.experts % parts:
            legal = [n for n in range(1, one.experts + 1) if one.experts % n == 0]
            op = graph.by_name[one.operation]
            raise NnscalerError(
                "plan_illegal",
                f"ep={parts} does not divide the {one.experts} experts of {op.name} (in {op.module or 'the model'})",
                where=op.where,
                help=f"ep in {legal}",
            )
    steps = _grouped({one.operation: Split(one.identifier) for one in experts})
    return (*steps, *_grouped(_with_tokens(graph, signatures, plan, mesh, steps)))


def _grouped(splits: Mapping[str, Split]) -> tuple[SplitStep, ...]:
    groups: dict[Split, list[str]] = {}
    for name, split in splits.items():
        groups.setdefault(split, []).append(name)
    return tuple(
        SplitStep(tuple(names), EP, split.identifier, split.outer, split.sections, split.sizes)
        for split, names in groups.items()
    )


def _with_tokens(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, mesh: Axes, steps: tuple[SplitStep, ...]
) -> dict[str, Split]:
    """Return the operations after experts that follow them away from the batch, and what they split without experts."""

    def chosen(one: Plan) -> dict[str, Choice]:
        made, axes = follow_batch(graph, signatures, one, mesh)
        at = [name for name, _ in axes].index(EP)
        return {name: choices[at] for name, choices in made.items()}

    plain, changed = chosen(plan), chosen(replace(plan, steps=(*plan.steps, *steps)))
    own = {name: step.identifier for step in steps for name in step.operations}
    parts = dict(mesh)[EP]
    reached = _reached(graph, signatures, parts, own.items())
    by_experts = {name: choice in reached[name] for name, choice in changed.items()}
    before, after = set(own), set(own)  # what has experts behind it, and before it, and is divided as they are
    for op in reversed(graph.operations):
        if by_experts[op.name] and any(r.name in before for n in op.outputs if n for r, _ in graph.consumers[n]):
            before.add(op.name)
    for op in graph.operations:
        if by_experts[op.name] and any(graph.producers[n].name in after for n in op.inputs if n in graph.producers):
            after.add(op.name)
    inside = before & after
    kept: dict[str, Split] = {}
    for op in graph.operations:
        choice = plain[op.name]
        reads = any(graph.producers[n].name in inside for n in op.inputs if n in graph.producers)
        if reads and op.name not in inside and isinstance(choice, Split) and changed[op.name] != choice:
            kept[op.name] = choice
    return kept
