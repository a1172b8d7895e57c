"""How parameters lie at rest, and which of their gradient reductions are deferred.

A stored tensor has three layouts: at rest (what optimizer and checkpoint see; `Invariant` or `Sharded` per axis), leaf
(at rest, with `Replicated` where some use wants a deferred reduction), and one per use. The layout at rest is chosen
jointly over axes and uses, among the layouts that some use wants: two axes chosen apart could overlap on a dim. Rest
steps of the plan shard it further: with ZeRO-3 the leaf as well, with ZeRO-1 and 2 only what lies between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import input_layouts
from nnscaler.ir.graph import LogicalTensor
from nnscaler.ir.layout_conversion import find_path
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import PartitionedGraph, Stage
from nnscaler.layout import IN_STEP, INVARIANT, REPLICATED, Invariant, Layout, Replicated, Sharded, local_shape
from nnscaler.transform.plan import ZERO
from nnscaler.transform.zero import assign_owners, on_owner, sharded_at_rest

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
