"""Choose the layouts of parameters at rest, and which of their gradient reductions are deferred.

A stored tensor has three layouts: at rest (what optimizer and checkpoint see; `Invariant` or `Sharded` per axis), leaf
(at rest, with `Replicated` where some use wants a deferred reduction), and one per use. The layout at rest is chosen
jointly over axes and uses, among the layouts that some use wants: two axes chosen apart could overlap on a dim. Rest
steps of the plan shard it further: with ZeRO-3 the leaf as well, with ZeRO-1 and 2 only what lies between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from op_registry.registry import facts_of

from nnscaler.communication.communicated_graph import (
    Compute,
    Convert,
    StageProgram,
    Stored,
    Version,
    again_in,
    differentiated,
    kept_inputs,
    reads,
    writes,
)
from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import find_path
from nnscaler.ir.derive_operand_layouts import input_layouts
from nnscaler.ir.graph import Graph, LogicalTensor, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import PartitionedGraph, Stage
from nnscaler.layout import (
    IN_STEP,
    INVARIANT,
    REPLICATED,
    Invariant,
    Layout,
    Replicated,
    Sharded,
    is_uneven,
    local_shape,
)
from nnscaler.transform.plan import ZERO
from nnscaler.transform.zero_sharded_parameters import assign_owners, on_owner, sharded_at_rest

MEMORY = 3.0  # an element at rest is held thrice: value, gradient, optimizer state


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The layouts of a stored tensor.

    at_rest   the layout that optimizer and checkpoint see
    leaf      the layout of the autograd leaf
    reduce    mesh axes over which the gradient is a partial sum
    stages    the stages that hold the tensor; they have meshes of one shape, or it has no gradient and rests whole
    scatter   "micro_batch": the gradient is divided like `at_rest` after each backward (ZeRO-2); "step": after the last
    """

    at_rest: Layout
    leaf: Layout
    reduce: tuple[str, ...]
    stages: tuple[int, ...]
    scatter: str = "step"

    def on(self, stage: Stage) -> tuple[Layout, Layout]:
        """Return (at rest, leaf) on one of the stages."""
        if all(isinstance(state, Invariant) for state in (*self.leaf, *self.at_rest)):
            return whole(stage), whole(stage)
        return self.at_rest, self.leaf


def whole(stage: Stage) -> Layout:
    """Return the layout in which every rank holds the tensor, at all times."""
    return (INVARIANT,) * len(stage.axes)


def outside_region(layout: Layout, stage: Stage) -> Layout:
    """Return the layout outside of the region that needs this one: whole on the axes of pieces."""
    first, end = stage.first_in_time, stage.first_in_step
    return (*layout[:first], *(INVARIANT,) * (end - first), *layout[end:])


def stored_layouts(partitioned: PartitionedGraph, signatures: Mapping[str, Signature]) -> dict[str, StoredLayout]:
    """Return the layouts of parameters, buffers and constants. Unused ones rest whole on the first stage."""
    graph = partitioned.graph
    uses: dict[str, list[tuple[int, Layout]]] = {t.name: [] for t in graph.with_role("parameter", "buffer", "constant")}
    for op in graph.operations:
        placement = partitioned.placements[op.name]
        for stage in placement.stages:
            needed = input_layouts(graph, op, signatures[op.name], placement.choices[stage])
            layouts = [outside_region(layout, partitioned.stages[stage]) for layout in needed]
            for name, layout in zip(op.inputs, layouts, strict=True):
                if name in uses:
                    uses[name].append((stage, layout))
    for buffer, value in graph.updates:
        producer = graph.producers.get(value)
        if producer is not None:
            uses[buffer].extend((s, ()) for s in partitioned.placements[producer.name].stages)
    owners = _owners(partitioned, uses)
    return {
        name: _choose(partitioned, graph.tensors[name], found, owners.get(name, {})) for name, found in uses.items()
    }


def _owners(
    partitioned: PartitionedGraph, uses: Mapping[str, Sequence[tuple[int, Layout]]]
) -> dict[str, dict[str, int]]:
    """parameter -> axis -> index of the rank that owns it there: those of one stage are given to its ranks in turn."""
    shared: dict[tuple[int, str], dict[str, int]] = {}  # stage, axis -> elements by parameter
    for name, axes in partitioned.at_rest.items():
        tensor = partitioned.graph.tensors[name]
        for axis, rest in axes.items():
            if rest.owned and tensor.needs_grad:
                stage = min((stage for stage, _ in uses[name]), default=0)
                shared.setdefault((stage, axis), {})[name] = tensor.elements
    found: dict[str, dict[str, int]] = {}
    for (stage, axis), weights in shared.items():
        parts = {a.name: a.size for a in partitioned.stages[stage].axes}.get(axis, 1)
        for name, owner in assign_owners(weights, parts).items():
            found.setdefault(name, {})[axis] = owner
    return found


def _choose(
    partitioned: PartitionedGraph,
    tensor: LogicalTensor,
    uses: list[tuple[int, Layout]],
    owners: Mapping[str, int],
) -> StoredLayout:
    stages = tuple(sorted({s for s, _ in uses})) or (0,)
    first = partitioned.stages[stages[0]]
    wanted = [layout for _, layout in uses if layout]
    if any(not partitioned.stages[s].mesh.same_shape(first.mesh) for s in stages):
        if tensor.needs_grad:
            raise NnscalerError(
                "plan_illegal",
                f"parameter {tensor.fqns[0]} is used on stages {list(stages)}, whose meshes differ in shape",
                help="give these stages meshes of one shape, or assign the uses to one stage",
            )
        return StoredLayout(whole(first), whole(first), (), stages)
    if tensor.needs_grad:
        _check_positions(tensor, [partitioned.stages[s] for s in stages])
    if tensor.role != "parameter" or not wanted:
        return StoredLayout(whole(first), whole(first), (), stages)
    candidates = dict.fromkeys((*(_at_rest(layout, first) for layout in wanted), whole(first)))
    zero = {axis: rest.zero for axis, rest in partitioned.at_rest.get(tensor.name, {}).items()}
    for axis in (i for i, a in enumerate(first.axes) if zero.get(a.name) == ZERO):
        candidates = dict.fromkeys(
            layout if isinstance(layout[axis], Sharded) else sharded_at_rest(layout, axis, first.sizes, tensor.shape)
            for layout in candidates
        )
    costs = [(_cost(tensor, first, rest, wanted), i) for i, rest in enumerate(candidates)]
    best = tuple(candidates)[min(costs)[1]]
    leaf = leaf_layout(tensor, first, best, wanted)
    axes = zip(first.axes, leaf, strict=True)
    reduce = tuple(a.name for a, s in axes if isinstance(s, Replicated) and a.name not in IN_STEP)
    at_rest = best
    for axis in (i for i, a in enumerate(first.axes) if tensor.needs_grad and zero.get(a.name) in (1, 2)):
        owner = owners.get(first.axes[axis].name)
        if owner is not None and not isinstance(best[axis], Sharded):
            at_rest = on_owner(at_rest, axis, first.sizes, tensor.shape, owner)
        elif not isinstance(best[axis], Sharded):
            at_rest = sharded_at_rest(at_rest, axis, first.sizes, tensor.shape)
    return StoredLayout(at_rest, leaf, reduce, stages, "micro_batch" if 2 in zero.values() else "step")


def _check_positions(tensor: LogicalTensor, stages: Sequence[Stage]) -> None:
    """Check that a rank of several of these stages has one place in their meshes: a gradient is summed over the ranks
    at one place. Raises NnscalerError("plan_illegal")."""
    places: dict[int, tuple[int, Stage]] = {}
    for stage in stages:
        for place, rank in enumerate(stage.mesh.ranks):
            before, other = places.setdefault(rank, (place, stage))
            if before != place:
                raise NnscalerError(
                    "plan_illegal",
                    f"parameter {tensor.fqns[0]} is used on the stages {other.index} and {stage.index}, of the devices "
                    f"{list(other.devices)} and {list(stage.devices)}: rank {rank} would hold two shards of it",
                    help="name the devices of both stages in one order",
                )


def _at_rest(layout: Layout, stage: Stage) -> Layout:
    """Sharded stays; anything else rests whole. Micro-batches are no place: nothing rests sharded over time."""
    first = stage.first_in_step
    resting = (s if isinstance(s, Sharded) else INVARIANT for s in layout[:first])
    return (*resting, *(INVARIANT,) * (len(layout) - first))


def leaf_layout(tensor: LogicalTensor, stage: Stage, at_rest: Layout, wanted: Iterable[Layout]) -> Layout:
    """Return the layout of the autograd leaf."""
    if not tensor.needs_grad:
        return at_rest
    leaf = list(at_rest)
    for axis, state in enumerate(at_rest):
        if state == INVARIANT and any(isinstance(layout[axis], Replicated) for layout in wanted):
            leaf[axis] = REPLICATED
    for axis in range(stage.first_in_step, len(leaf)):
        if stage.sizes[axis] > 1:
            leaf[axis] = REPLICATED  # autograd accumulates over micro-batches and slices
    return tuple(leaf)


def _cost(tensor: LogicalTensor, stage: Stage, at_rest: Layout, wanted: Sequence[Layout]) -> float:
    leaf = leaf_layout(tensor, stage, at_rest, wanted)
    total = 0.0
    for layout in dict.fromkeys(wanted):
        found = find_path(leaf, layout, stage.sizes, tensor.shape, tensor.needs_grad, stage.first_in_time)
        if found is None:
            return float("inf")
        total += found[0]
    elements = prod(local_shape(at_rest, stage.sizes, tensor.shape))
    reduced = (a for a, s in zip(stage.axes, leaf, strict=True) if isinstance(s, Replicated))
    deferred = [a.size for a in reduced if a.name not in IN_STEP]
    return total + MEMORY * elements + sum(2 * (p - 1) / p * elements for p in deferred)


# List the communication between a parameter at rest and its leaf, which no line of the program shows.
# Under ZeRO-1 and 2 the leaf is gathered from the tensors at rest before the first forward, and its gradient is summed
# and divided like them, after the last backward or after each one. What is still a partial sum then is summed once a
# step. The communication profile, the volumes and the predicted times of a program are made from these moves.

RestPhase = Literal["gather", "B", "gradient"]


@dataclass(frozen=True, slots=True)
class RestMove:
    """One collective of one parameter.

    kind    all_gather of values; reduce_scatter or all_reduce of gradients
    phase   "gather": before the first forward; "B": after each backward; "gradient": after the last one
    axes    over which, of the stage's mesh
    whole   layout of what all ranks of a group have after a gather, and before a sum
    part    layout of what each has before a gather, and after a sum
    dtype   in which it travels
    depth   the number of axes that divide `whole` between steps; runs of one depth share buckets
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    phase: RestPhase
    axes: tuple[str, ...]
    whole: Layout
    part: Layout
    dtype: str
    depth: int

    def bytes(self, stage: Stage, shape: tuple[int, ...]) -> int:
        """Return the bytes of the whole on a rank, for a parameter of this logical shape; on the rank that has most."""
        return prod(local_shape(self.whole, stage.sizes, shape)) * element_bytes(self.dtype)

    def times(self, stage: Stage) -> int:
        """Return how often a step makes it."""
        return stage.passes if self.phase == "B" else 1


def rest_moves(graph: Graph, program: StageProgram, stored: Stored) -> Iterator[RestMove]:
    """Yield the moves of a stored tensor, gathers first; none for one that rests as it is read and gets no gradient."""
    tensor, names = graph.tensors[stored.tensor], program.stage.names
    divisions: list[tuple[str, Layout, Layout]] = []
    layout = stored.leaf
    for position in stored.rest:
        part = (*layout[:position], stored.at_rest[position], *layout[position + 1 :])
        divisions.append((names[position], layout, part))
        layout = part
    for depth, (axis, whole, part) in reversed(list(enumerate(divisions))):
        yield RestMove("all_gather", "gather", (axis,), whole, part, tensor.dtype, depth)
    if tensor.role != "parameter" or not tensor.needs_grad or not graph.consumers[stored.tensor]:
        return
    dtype = tensor.sums or gradient_dtype(tensor.dtype)
    at_once = bool(divisions) and stored.scatter == "micro_batch" and program.gradient
    for depth, (axis, whole, part) in enumerate(divisions):
        if axis in stored.reduce:
            yield RestMove("reduce_scatter", "B" if at_once else "gradient", (axis,), whole, part, dtype, depth)
    summed = stored.summed(names)
    if summed or len(stored.copies) > 1:  # `axes` are those of this stage; the other ones that hold it take part
        wide = gradient_dtype(dtype) if at_once else dtype  # shards are added up over micro-batches
        yield RestMove("all_reduce", "gradient", summed, layout, layout, wide, len(divisions))


def moves_of(graph: Graph, program: StageProgram) -> Iterator[tuple[Stored, RestMove]]:
    """Yield the moves of all stored tensors of a stage."""
    for stored in program.stored:
        for move in rest_moves(graph, program, stored):
            yield stored, move


# Parameters that lie in shards where a stage reads them (ZeRO-3): which statements gather them, and what gathers them
# again in backward.
# The runtime lets go of a whole after the last statement that reads it, and gathers it once more for what backward
# reads of it (`sharded_parameter_gathers`). Of one dim it is kept: what is saved is not worth a call. All are kept
# where ranks have unequal parts of a batch, for which autograd need not save the same (`may_gather_again` of a stage).

_SAME_MEMORY = ("replicate", "invariant")  # rows whose result is a view


def parameter_gathers(graph: Graph, program: StageProgram) -> Mapping[int, Convert]:
    """Return the conversions of `forward` that make a parameter whole before it is read, by position."""
    parameters = {s.variable for s in program.stored if graph.tensors[s.tensor].role == "parameter"}
    found: dict[int, Convert] = {}
    for i, statement in enumerate(program.forward):
        if isinstance(statement, Convert) and statement.source.variable in parameters:
            trained = graph.tensors[statement.source.tensor].needs_grad
            if statement.move.row.function == ("all_gather_replicated" if trained else "all_gather"):
                found[i] = statement
    return found


def let_go(graph: Graph, program: StageProgram) -> Mapping[str, int]:
    """Return, by variable that shows a gathered parameter which is not kept for backward, what gathers it."""
    given = [feed.version.layout for feed in program.feeds] + [m.target.layout for m in program.receives]
    gathers = parameter_gathers(graph, program)
    found: dict[str, int] = {}
    if not gathers or any(map(is_uneven, given)):
        return found
    for i, statement in enumerate(program.forward):
        made = [v.variable for v in writes(statement)]
        if i in gathers:
            if len(graph.tensors[gathers[i].source.tensor].shape) > 1:
                found.update(dict.fromkeys(made, i))
        elif isinstance(statement, Convert):
            if statement.source.variable in found and _is_view(graph, program, statement):
                found.update(dict.fromkeys(made, found[statement.source.variable]))
        elif isinstance(statement, Compute) and facts_of(statement.operation.operator).view:
            shown = found.get(statement.inputs[0].variable)
            found.update(dict.fromkeys(made, shown) if shown is not None else {})
    return found


def _is_view(graph: Graph, program: StageProgram, statement: Convert) -> bool:
    """Return whether a conversion gives the memory that it is given; of a slice in time, where that is in one piece."""
    if statement.move.row.function in _SAME_MEMORY:
        return True
    state = statement.move.target[statement.move.axis]
    if statement.move.axis < program.stage.first_in_time or not isinstance(state, Sharded):
        return False
    before = graph.tensors[statement.source.tensor].shape[: state.dim]
    return state.outer == 1 and not state.sections and all(size == 1 for size in before)


def gathered_again(graph: Graph, program: StageProgram) -> Mapping[int, tuple[int, ...]]:
    """Return, by statement that gathers a parameter, those for which backward gathers it once more: that keep it, or
    are run again with it and stand in another region than the gather. It comes before the last one of them."""
    wholes = let_go(graph, program) if program.gradient else {}
    live = differentiated(graph, program) if wholes else frozenset()
    regions = [again_in(graph, program.forward, i) for i in range(len(program.forward))] if wholes else []
    found: dict[int, list[int]] = {}
    for i, (statement, region) in enumerate(zip(program.forward, regions, strict=False)):
        if live.isdisjoint(v.variable for v in writes(statement)):
            continue
        read: Sequence[Version] = ()
        if region is not None:
            read = reads(statement)
        elif isinstance(statement, Compute):
            read = kept_inputs(graph, statement)
        for gather in {wholes[v.variable] for v in read if v.variable in wholes}:
            if gather != i and (region is None or regions[gather] != region):
                found.setdefault(gather, []).append(i)
    return {gather: tuple(readers) for gather, readers in found.items()}
