"""Regions that run in chunks, one after another on the same ranks: coshard (Lin et al., nnScaler, OSDI 2024).

The pieces of a region are an axis in time, like micro-batches: it has no ranks, states on it mean the same, and nothing
can be communicated over it before the last piece is done. One operation of the region is split as its step says. The
splits that this induces, forward and backward, are those of a mesh axis (`candidates`), and what they do not reach
follows (`propagate`). Entering a region costs nothing: what every piece reads is `Replicated`, and autograd adds up its
gradients. What leaves it is added up, or joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import find_path
from nnscaler.ir.derive_operand_layouts import (
    even_or_balanced,
    explain_illegal_choice,
    explain_illegal_choices,
    input_states,
    output_states,
)
from nnscaler.ir.graph import Graph, Operation, is_free_name
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Chunk, RunInvariant, Split
from nnscaler.layout import INVARIANT, Replicated
from nnscaler.transform.plan import Axes, ChunkStep, Plan
from nnscaler.transform.propagate_choices import FollowAxis, follow, spread
from nnscaler.transform.select_operations import matches, select


@dataclass(frozen=True, slots=True)
class ChunkedRegion:
    """A region, its step and its operations, in order."""

    chunk: Chunk
    step: ChunkStep
    operations: tuple[Operation, ...]


def check_chunks(plan: Plan) -> None:
    """Check the axes of a plan's regions. Raises NnscalerError("plan_illegal")."""
    taken = {name for axes in (plan.mesh, *plan.mesh_axes) for name, _ in axes}
    parts: dict[str, int] = {}
    for step in plan.steps:
        if not isinstance(step, ChunkStep):
            continue
        if step.parts < 2 or parts.setdefault(step.axis, step.parts) != step.parts:
            other = f", and in {parts[step.axis]} in another step" if step.parts > 1 else ""
            message = f"a chunk step runs {', '.join(step.operations)} in {step.parts} pieces of {step.axis}{other}"
            help = "a region has at least 2 pieces; give regions with other numbers of pieces axes of their own"
            raise NnscalerError("plan_illegal", message, help=help)
        if not is_free_name(step.axis) or step.axis == "pp" or step.axis in taken:
            message = f"a chunk step names its axis {step.axis!r}"
            help = f"a word that is no axis of the mesh ({', '.join(sorted(taken)) or 'none'}), such as co"
            raise NnscalerError("plan_illegal", message, help=help)


def regions_of(
    graph: Graph, plan: Plan, stage_of: Mapping[str, tuple[int, ...]]
) -> tuple[Graph, tuple[ChunkedRegion, ...]]:
    """Return the regions of a plan, and the graph in whose order each of them is in one place.

    A region is a run of operations of one step on the same stages. What stands between them and belongs to no region is
    moved before the run where it reads nothing of it, else behind it; where neither can be, a region ends. Where a
    pattern names several modules, each of them is a region by itself. Later steps win. Raises
    NnscalerError("plan_illegal") for a pattern that names nothing.
    """
    step_of: dict[str, ChunkStep] = {}
    for given in plan.steps:
        if isinstance(given, ChunkStep):
            step_of.update((op.name, given) for op in select(graph, given.operations))
    order: list[Operation] = []
    runs: list[tuple[ChunkStep, list[Operation]]] = []
    end = 0  # of the last run, in `order`
    for op in graph.operations:
        step, between = step_of.get(op.name), order[end:]
        if step is None:
            order.append(op)
            continue
        behind = None
        if runs and runs[-1][0] is step and _of_one_region(runs[-1][1][-1], op, step, stage_of):
            behind = _behind(runs[-1][1], between, op)
        if behind is None:
            runs.append((step, [op]))
            order.append(op)
            end = len(order)
        else:
            run, later = runs[-1][1], {other.name for other in behind}
            ahead = [other for other in between if other.name not in later]
            order[end - len(run) :] = [*ahead, *run, op, *behind]
            run.append(op)
            end += len(ahead) + 1
    counts: dict[str, int] = {}
    found: list[ChunkedRegion] = []
    for of, operations in runs:
        counts[of.axis] = counts.get(of.axis, -1) + 1
        chunk = Chunk(f"{of.axis}_{counts[of.axis]}", of.axis, of.recompute)
        found.append(ChunkedRegion(chunk, of, tuple(operations)))
    return graph.replace(operations=tuple(order)) if found else graph, tuple(found)


def _behind(run: Sequence[Operation], between: Sequence[Operation], op: Operation) -> list[Operation] | None:
    """Return the operations between a run and the next one that read of the run; None where the next one needs them."""
    made = {name for other in run for name in other.outputs}
    behind: list[Operation] = []
    later: set[str | None] = set()
    for other in between:
        if not made.union(later).isdisjoint(other.inputs):
            behind.append(other)
            later.update(other.outputs)
    return None if not later.isdisjoint(op.inputs) else behind


def _of_one_region(one: Operation, other: Operation, step: ChunkStep, stage_of: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether two operations of a step, on the same stages, are of one region."""
    return stage_of[one.name] == stage_of[other.name] and _of_one_module(one, other, step)


def _of_one_module(one: Operation, other: Operation, step: ChunkStep) -> bool:
    """Return whether no pattern names two modules of which these operations are."""
    for pattern in step.operations:
        modules = [_module(op, pattern) for op in (one, other) if matches(op, pattern)]
        if len(modules) == 2 and modules[0] != modules[1]:
            return False
    return True


def _module(op: Operation, pattern: str) -> str:
    """Return the outermost module around the operation that a pattern names; empty where it names none."""
    parts = op.module.split(".")
    paths = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((path for path in paths if fnmatchcase(path, pattern)), "")


def choose_pieces(
    graph: Graph,
    signatures: Mapping[str, Signature],
    axis: tuple[str, int],
    regions: Sequence[ChunkedRegion],
    made: Mapping[str, tuple[Choice, ...]],
    axes: Axes,
) -> dict[str, Choice]:
    """Choose on the axis of regions for every operation: outside of them, all is whole.

    `made`: the choices on `axes`, with which these must be legal together. Raises NnscalerError("plan_illegal").
    """
    found: dict[str, Choice] = {op.name: RunInvariant() for op in graph.operations}
    for region in regions:
        if region.step.axis == axis[0]:
            found.update(_choose(graph, signatures, region, made, axes))
    return found


def _choose(
    graph: Graph,
    signatures: Mapping[str, Signature],
    region: ChunkedRegion,
    made: Mapping[str, tuple[Choice, ...]],
    axes: Axes,
) -> dict[str, Choice]:
    step, inside = region.step, _as_graph(graph, region.operations)
    every = (*axes, (step.axis, step.parts))

    def why_not(op: Operation, choice: Choice) -> str | None:
        return explain_illegal_choices(graph, op, signatures[op.name], (*made[op.name], choice), every)

    anchor, identifier = _anchor(region, signatures)
    signature, before = signatures[anchor.name], made[anchor.name]
    split = _nested(signature, identifier, step, before, axes)
    reason = explain_illegal_choice(signature, split, step.parts) or why_not(anchor, split)
    if reason:
        legal = [i for i in signature.identifiers if not why_not(anchor, _nested(signature, i, step, before, axes))]
        raise NnscalerError(
            "plan_illegal",
            f"chunk of {anchor.name} in {step.parts} pieces of {step.axis}: {reason} ({anchor.operator} is annotated "
            f"`{'' if signature.bound is None else signature.bound.text}`)",
            where=anchor.where,
            help=f"identifiers of {anchor.name} that {step.parts} pieces may split here: {', '.join(legal) or 'none'}",
        )
    explicit: dict[str, Choice] = {}
    for name, splits in spread(inside, signatures, step.parts, anchor, split).items():
        first = next((s for s in splits if not why_not(graph.by_name[name], s)), None)
        if first is not None:
            explicit[name] = first
    explicit[anchor.name] = split
    follow_axis = FollowAxis(step.axis, step.parts, in_time=True)
    found = follow(inside, signatures, follow_axis, {}, explicit, made, axes)
    _check_edges(inside, signatures, region, found)
    return found


def _as_graph(graph: Graph, operations: Sequence[Operation]) -> Graph:
    """Return the region as a graph, whose inputs and results are what crosses its border."""
    made = {name: None for op in operations for name in op.outputs if name is not None}
    read = {name: None for op in operations for name in op.inputs}
    names = {op.name for op in operations}
    tensors = {
        name: replace(graph.tensors[name], role="input")
        if graph.tensors[name].role == "activation" and name not in made
        else graph.tensors[name]
        for name in (*read, *made)
    }
    leaving = tuple(
        (name, name)
        for name in made
        if name in graph.ends or any(reader.name not in names for reader, _ in graph.consumers[name])
    )
    return Graph(graph.name, tensors, tuple(operations), "", (), leaving)


def _anchor(region: ChunkedRegion, signatures: Mapping[str, Signature]) -> tuple[Operation, str]:
    """Return the operation that the step splits, and its identifier. Raises NnscalerError("plan_illegal")."""
    step = region.step
    pattern, named, identifier = step.identifier.rpartition(":")
    known = {op: signatures[op.name].identifiers for op in region.operations if not named or matches(op, pattern)}
    found = next((op for op, identifiers in known.items() if identifier in identifiers), None)
    if found is not None:
        return found, identifier
    op = region.operations[0]
    those = f"no operation that {pattern!r} names" if named else "no operation"
    listed = {o.name: i for o in region.operations if (i := signatures[o.name].identifiers)}
    told = ", ".join(f"{name}:{'|'.join(identifiers)}" for name, identifiers in listed.items()) or "none"
    message = f"{those} of the region {op.name} .. {region.operations[-1].name} has the identifier {identifier!r}"
    raise NnscalerError("plan_illegal", message, where=op.where, help=f"identifiers of this region: {told}")


def _nested(signature: Signature, identifier: str, step: ChunkStep, made: Sequence[Choice], axes: Axes) -> Split:
    """Return the split into pieces of what a rank has of the identifier: inside of the splits over other axes."""
    outer = 1
    for choice, (_, parts) in zip(made, axes, strict=True):
        if isinstance(choice, Split) and choice.identifier == identifier and parts > 1:
            outer = max(outer, choice.outer * parts)
    return Split(identifier, outer) if outer > 1 else even_or_balanced(signature, identifier, step.parts)


def _check_edges(
    inside: Graph, signatures: Mapping[str, Signature], region: ChunkedRegion, found: Mapping[str, Choice]
) -> None:
    """Check that each piece has, in the piece, what its operations need. Raises NnscalerError("plan_illegal")."""
    step = region.step
    for op in inside.operations:
        for name, needed in zip(op.inputs, input_states(signatures[op.name], found[op.name]), strict=True):
            producer, tensor = inside.producers.get(name), inside.tensors[name]
            if producer is None:
                continue  # what comes from outside is whole, and can be cut or kept
            made = output_states(signatures[producer.name], found[producer.name], len(producer.outputs))
            state = made[producer.outputs.index(name)]
            if not tensor.needs_grad:
                state, needed = (INVARIANT if isinstance(s, Replicated) else s for s in (state, needed))
            if find_path((state,), (needed,), (step.parts,), tensor.shape, tensor.needs_grad, 0) is None:
                raise NnscalerError(
                    "plan_illegal",
                    f"a piece of {step.axis} has {name} {state}, and {op.operator} ({op.name}, {found[op.name]}) needs "
                    f"it {needed}: that is known when all {step.parts} pieces are done",
                    where=op.where,
                    help=f"leave {op.name} and what follows out of the chunk step, or {producer.name} and what is "
                    "before it, or split another identifier",
                )
