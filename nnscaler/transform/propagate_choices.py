"""Propagate choices to operations that have none: on one axis, let each follow the layouts that reach it.

Data parallelism and micro-batches are made in this way alone: the inputs are sharded along their batch dim, and each
operation takes the choice that its inputs' layouts suggest at the least communication. A hand-written plan is completed
in the same way: the user's choices are fixed and the rest follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import STEP, find_path
from nnscaler.ir.derive_operand_layouts import (
    even_or_balanced,
    explain_illegal_choices,
    input_states,
    is_legal,
    output_states,
    over_slices,
    resolve,
)
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.layout import (
    IN_STEP,
    INVARIANT,
    MICRO,
    REPLICATED,
    SLICE,
    Invariant,
    Partial,
    Replicated,
    Sharded,
    State,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class FollowAxis:
    """The axis whose choices are made. `in_time`: it is one of micro-batches, slices or pieces, which cannot
    communicate."""

    name: str
    parts: int
    in_time: bool = False


@dataclass(frozen=True, slots=True)
class _Following:
    """The facts from which the choices on one axis are made.

    axis     the axis whose choices are made
    states   by tensor, its state on this axis so far
    made     by operation, its choices on the axes before
    every    all axes up to this one
    """

    graph: Graph
    signatures: Mapping[str, Signature]
    axis: FollowAxis
    states: Mapping[str, State]
    made: Mapping[str, Sequence[Choice]]
    every: Sequence[tuple[str, int]]

    def illegal(self, op: Operation, choice: Choice) -> bool:
        """Return whether a choice is illegal, together with those on the axes before."""
        choices = (*self.made[op.name], choice)
        return bool(explain_illegal_choices(self.graph, op, self.signatures[op.name], choices, self.every))


def follow(
    graph: Graph,
    signatures: Mapping[str, Signature],
    axis: FollowAxis,
    inputs: Mapping[str, State],
    explicit: Mapping[str, Choice],
    made: Mapping[str, Sequence[Choice]],
    axes: Sequence[tuple[str, int]],
) -> dict[str, Choice]:
    """Choose for each operation by the layouts of its inputs.

    `inputs`: the state of input tensors on this axis. `explicit`: choices that stand. `made`: the choices on `axes`,
    made before, with which the new ones must be legal together. Raises NnscalerError("micro_batches_coupled") where an
    operation needs values of several micro-batches at once.
    """
    states: dict[str, State] = {}
    for tensor in graph.tensors.values():
        if tensor.role != "activation":
            default = REPLICATED if tensor.needs_grad else INVARIANT
            states[tensor.name] = inputs.get(tensor.name, default)
    following = _Following(graph, signatures, axis, states, made, (*axes, (axis.name, axis.parts)))
    choices: dict[str, Choice] = {}
    memo: dict[Any, Choice] = {}
    for op in graph.operations:
        signature = signatures[op.name]
        choice = explicit.get(op.name)
        if choice is None:
            seen = tuple((states[n], graph.tensors[n].needs_grad, graph.tensors[n].role) for n in op.inputs)
            made_grads = tuple(n is not None and graph.tensors[n].needs_grad for n in op.outputs)
            key = (id(signature), made[op.name], seen, made_grads)
            choice = memo.get(key)
            if choice is None:
                choice = memo[key] = _cheapest(following, op)
        choices[op.name] = choice
        for name, state in zip(op.outputs, output_states(signature, choice, len(op.outputs)), strict=True):
            if name is not None:
                full = isinstance(state, Replicated) and not graph.tensors[name].needs_grad
                states[name] = INVARIANT if full else rows_of(state)
    return _follow_readers(following, explicit, choices)


def _follow_readers(
    following: _Following, explicit: Mapping[str, Choice], choices: Mapping[str, Choice]
) -> dict[str, Choice]:
    """Compute values that no input reaches (masks, positions) in the shards that all of their readers take.

    Such a value needs no gradient, and slicing its inputs is free. Left whole, a mask would have the size of the global
    batch, on every rank and for every micro-batch. Numbers that a hook makes by the rank's place (`arange`) stay whole
    and are sliced: that is proved for all sizes.
    """
    graph, signatures = following.graph, following.signatures
    found = dict(choices)
    for op in reversed(graph.operations):
        signature = signatures[op.name]
        if op.name in explicit or isinstance(found[op.name], Split | RunPartial):
            continue
        if not op.inputs and signature.spec is not None and signature.spec.localize is not None:
            continue
        wanted = [_wanted(graph, signatures, found, name) for name in op.outputs]
        at, state = next(((i, state) for i, state in enumerate(wanted) if isinstance(state, Sharded)), (0, None))
        split = None if state is None else split_of(signature, True, at, state, following.axis.parts)
        if split is None or list(output_states(signature, split, len(op.outputs))) != wanted:
            continue
        if following.illegal(op, split):
            continue
        before, cuts = _cost(following, op, found[op.name]), STEP * len(op.inputs)
        if _cost(following, op, split) <= before + cuts:
            found[op.name] = split
    return found


def _wanted(
    graph: Graph, signatures: Mapping[str, Signature], choices: Mapping[str, Choice], name: str | None
) -> State | None:
    """Return the state in which all readers of a tensor without gradient take it; None where they differ, or have no
    say."""
    if name is None or graph.tensors[name].needs_grad or name in graph.ends:
        return None
    taken = {input_states(signatures[op.name], choices[op.name])[slot] for op, slot in graph.consumers[name]}
    return taken.pop() if len(taken) == 1 else None


def _cheapest(following: _Following, op: Operation) -> Choice:
    """Return the legal choice that follows the states of the inputs at the least cost."""
    signature = following.signatures[op.name]
    every = _options(op, signature, following.axis, following.states)
    options = [c for c in every if not following.illegal(op, c)]
    costs = [(_cost(following, op, c), i) for i, c in enumerate(options)]
    cost, best = min(costs)
    if cost == inf:
        if following.axis.name == SLICE:
            raise _needs_later(op, signature)
        raise _coupled(op, following) if following.axis.name == MICRO else _in_pieces(op, following)
    return options[best]


def _options(op: Operation, signature: Signature, axis: FollowAxis, states: Mapping[str, State]) -> list[Choice]:
    """Return the choices worth comparing, best first where costs tie."""
    options: dict[Choice, None] = {}
    if signature.bound is not None:
        for name, operand in zip(op.inputs, signature.bound.inputs, strict=True):
            split = resolve(operand, states[name], axis.parts)
            if split is not None:
                options[over_slices(signature, split) if axis.name == SLICE else split] = None
        for slots in signature.linear:
            options[RunPartial(slots)] = None
    whole: tuple[Choice, ...] = (RunReplicated(), RunInvariant())
    if all(isinstance(states[name], Invariant) for name in op.inputs):
        whole = (RunInvariant(), RunReplicated())
        return [*whole, *options]
    followed = [c for c in options if isinstance(c, Split)]
    return [*followed, *whole, *(c for c in options if not isinstance(c, Split))]


def _cost(following: _Following, op: Operation, choice: Choice) -> float:
    """Count the elements communicated to bring the inputs into the layouts that the choice needs, plus work left
    whole."""
    graph, axis, states = following.graph, following.axis, following.states
    total = 0.0
    for name, needed in zip(op.inputs, input_states(following.signatures[op.name], choice), strict=True):
        tensor = graph.tensors[name]
        here = states[name]
        if not tensor.needs_grad and isinstance(needed, Replicated):
            needed = INVARIANT
        if here == needed:
            continue
        stored = tensor.role != "activation" and tensor.role != "input"
        found = find_path(
            (here,), (needed,), (axis.parts,), tensor.shape, tensor.needs_grad, 0 if axis.in_time else None
        )
        if found is not None and found[0] < inf:
            total += 0.0 if stored else found[0]
        elif axis.name in IN_STEP and not tensor.needs_grad:
            total += 1.0 + tensor.elements  # computed once per step, on all micro-batches and slices
        else:
            return inf
    if not isinstance(choice, Split) and any(isinstance(states[n], Sharded) for n in op.inputs):
        # the whole operation is run by every rank although its inputs are sharded
        total += sum(graph.tensors[n].elements for n in op.outputs if n is not None)
    return total


def _in_pieces(op: Operation, following: _Following) -> NnscalerError:
    axis = following.axis
    return NnscalerError(
        "plan_illegal",
        f"{op.operator} ({op.name}, in {op.module or 'the model'}) needs values of all {axis.parts} pieces of "
        f"{axis.name} at once",
        where=op.where,
        help=f"leave {op.name} and what follows out of the chunk step, or split another identifier",
    )


def _needs_later(op: Operation, signature: Signature) -> NnscalerError:
    message = f"{op.operator} ({op.name}, in {op.module or 'the model'}) needs tokens of later slices"
    help = "slices of tokens are for models whose tokens read earlier ones only (is_causal=True): leave slices away, "
    help += "and use micro-batches (--micro-batches N)"
    if signature.bound is None:
        help += f"; or say how {op.operator} splits, which nothing says yet: nnscaler.register_op"
    return NnscalerError("slices_coupled", message, where=op.where, help=help)


def _summed_by(op: Operation, following: _Following) -> Operation | None:
    """Return the operation whose result became a sum of terms on the axis, and reaches this one as such; None where
    nothing does."""
    found: Operation | None = None
    while True:
        terms = [name for name in (found or op).inputs if isinstance(following.states[name], Partial)]
        maker = following.graph.producers.get(terms[0]) if terms else None
        if maker is None:
            return found
        found = maker


def _coupled(op: Operation, following: _Following) -> NnscalerError:
    signature, summed = following.signatures[op.name], _summed_by(op, following)
    cure = "compute this value from the inputs alone, so that it can be computed once per step"
    if signature.bound is None:
        cure = f"say how it splits, which nothing says yet: nnscaler.register_op annotates {op.operator}"
    what = f"{op.operator} ({op.name}, in {op.module or 'the model'})"
    if op.operator == "aten.to.dtype":
        cure = "sum in float32 (the loss of `logits.float()`): a rounded sum is not the sum of rounded terms"
    spec = None if summed is None else following.signatures[summed.name].spec
    why = ""
    if summed is not None and spec is not None and spec.gathers:  # by indices of the whole batch, sorted by expert say
        at = f", {Path(summed.where.file).name}:{summed.where.line}" if summed.where else ""
        why = f": {summed.operator} ({summed.name}{at}) gathers rows of the whole batch, and a micro-batch has some"
        cure = "dp in the place of pp; or gather the rows of each sample by itself, as examples/moe_dispatch.py does"
    if op.operator.startswith("nnscaler.batch_"):  # nobody wrote that name
        what = f"batch norm `{op.module}` takes its statistics over the whole batch: it"
        cure = "dp or tp in the place of pp; or a norm of each sample, such as GroupNorm"
    return NnscalerError(
        "micro_batches_coupled",
        f"{what} needs the values of all micro-batches at once{why}",
        where=op.where,
        help=f"use one micro-batch (--micro-batches 1), with which stages wait for each other; or {cure}",
    )


# Find the splits worth considering: a work-list fixpoint that carries them between producers and consumers.
# A split of a `view`'s heads induces a strided split of the packed `qkv` projection five operations earlier, which no
# identifier of the projection names by itself. Terminates because an `outer` divides the size of its identifier. The
# walk is per tensor layout; a global union of dims would merge batch and sequence through `view(-1)`.

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
