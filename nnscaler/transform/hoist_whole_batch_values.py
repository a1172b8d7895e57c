"""Hoist values that all micro-batches share out of them: computed once per step, before the first forward.

Micro-batches are a mesh axis in time, on which nothing can be communicated; slices of tokens are another, on which a
slice has what earlier ones made, and no more. A tensor that is a shard or a partial sum over them (the number of labels
that count) and is needed whole must depend on no parameter; the operations that compute it are repeated in the
program's `prepare`, where they see the rank's whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import find_path
from nnscaler.ir.derive_operand_layouts import input_states, output_states
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import PartitionedGraph, Placement, RunInvariant
from nnscaler.layout import INVARIANT, SLICE, Replicated

SUFFIX = "_of_step"


def hoist(partitioned: PartitionedGraph, signatures: dict[str, Signature]) -> PartitionedGraph:
    """Move what couples micro-batches into `prepare`. `signatures` gains the repeated operations."""
    graph = partitioned.graph
    if partitioned.stages[0].passes == 1:
        return partitioned
    uses = [
        (op, slot, axis)
        for op in graph.operations
        for slot in range(len(op.inputs))
        if (axis := _coupled_axis(partitioned, signatures, op, slot)) is not None
    ]
    if not uses and not graph.updates:
        return partitioned
    hoisted: dict[str, None] = {}
    for op, slot, axis in uses:
        _collect(graph, op, op.inputs[slot], hoisted, axis)
    first = partitioned.stages[0].names[partitioned.stages[0].first_in_step]
    for _, value in graph.updates:  # a buffer changes once per step, not once per micro-batch
        _collect(graph, graph.producers[value], value, hoisted, first)
    return _rebuild(partitioned, signatures, [(op, slot) for op, slot, _ in uses], hoisted)


def _coupled_axis(
    partitioned: PartitionedGraph, signatures: Mapping[str, Signature], op: Operation, slot: int
) -> str | None:
    """Return the axis in time whose pieces an operand is needed of together; None where each piece needs its own."""
    graph = partitioned.graph
    name = op.inputs[slot]
    tensor = graph.tensors[name]
    producer = graph.producers.get(name)
    if producer is None:
        return None
    stage = partitioned.stages[0]  # the choices in time are the same on all of them
    for axis in range(stage.first_in_step, len(stage.sizes)):
        of_producer, of_reader = (partitioned.placements[o.name].choices[0][axis] for o in (producer, op))
        made = output_states(signatures[producer.name], of_producer, len(producer.outputs))
        state = made[producer.outputs.index(name)]
        needed = input_states(signatures[op.name], of_reader)[slot]
        if not tensor.needs_grad:
            state, needed = (INVARIANT if isinstance(s, Replicated) else s for s in (state, needed))
        if find_path((state,), (needed,), (stage.sizes[axis],), tensor.shape, tensor.needs_grad, 0) is None:
            return stage.names[axis]
    return None


def _collect(graph: Graph, user: Operation, name: str, hoisted: dict[str, None], axis: str) -> None:
    """Add the operations that compute `name`, which must depend on inputs and constants only."""
    tensor = graph.tensors[name]
    if tensor.needs_grad or tensor.role == "parameter":
        sliced = axis == SLICE
        raise NnscalerError(
            "slices_coupled" if sliced else "micro_batches_coupled",
            f"{user.operator} ({user.name}) needs {name} of all {'slices' if sliced else 'micro-batches'} at once, and "
            "it depends on parameters",
            where=user.where,
            help="leave slices away" if sliced else "use one micro-batch (--micro-batches 1)",
        )
    producer = graph.producers.get(name)
    if producer is None or producer.name in hoisted:
        return
    for source in producer.inputs:
        _collect(graph, user, source, hoisted, axis)
    hoisted[producer.name] = None


def _rebuild(
    partitioned: PartitionedGraph,
    signatures: dict[str, Signature],
    uses: list[tuple[Operation, int]],
    hoisted: dict[str, None],
) -> PartitionedGraph:
    graph = partitioned.graph
    tensors = dict(graph.tensors)
    placements = dict(partitioned.placements)
    stages_of = _stages_that_need(graph, partitioned, uses, hoisted)
    rename: dict[str, str] = {}
    clones: list[Operation] = []
    for op in graph.operations:
        if op.name not in hoisted:
            continue
        for name in op.outputs:
            if name is not None:
                rename[name] = name + SUFFIX
                tensors[name + SUFFIX] = replace(graph.tensors[name], name=name + SUFFIX)
        clone = replace(
            op,
            name=op.name + SUFFIX,
            inputs=tuple(rename.get(n, n) for n in op.inputs),
            outputs=tuple(rename[n] if n is not None else None for n in op.outputs),
        )
        clones.append(clone)
        signatures[clone.name] = signatures[op.name]
        old = partitioned.placements[op.name]
        choices = tuple(
            tuple(RunInvariant() if axis >= stage.first_in_time else c for axis, c in enumerate(on_stage))
            for stage, on_stage in zip(partitioned.stages, old.choices, strict=True)
        )
        placements[clone.name] = Placement(stages_of[op.name], choices, prepare=True)
    changed = {(op.name, slot) for op, slot in uses}
    updates = tuple((buffer, rename[value]) for buffer, value in graph.updates)
    rest = [
        replace(op, inputs=tuple(rename[n] if (op.name, s) in changed else n for s, n in enumerate(op.inputs)))
        for op in graph.operations
    ]
    changed_graph = graph.replace(tensors=tensors, operations=(*clones, *rest), updates=updates)
    return _without_dead(replace(partitioned, graph=changed_graph, placements=placements))


def _stages_that_need(
    graph: Graph, partitioned: PartitionedGraph, uses: list[tuple[Operation, int]], hoisted: dict[str, None]
) -> dict[str, tuple[int, ...]]:
    needed: dict[str, set[int]] = {name: set() for name in hoisted}
    for op, slot in uses:
        needed[graph.producers[op.inputs[slot]].name].update(partitioned.placements[op.name].stages)
    for _, value in graph.updates:
        producer = graph.producers[value]
        needed[producer.name].update(partitioned.placements[producer.name].stages)
    for op in reversed(graph.operations):
        if op.name in hoisted:
            for source in (graph.producers[name] for name in op.inputs if name in graph.producers):
                needed[source.name].update(needed[op.name])
    return {name: tuple(sorted(stages)) for name, stages in needed.items()}


def _without_dead(partitioned: PartitionedGraph) -> PartitionedGraph:
    """Drop operations whose results only the hoisted copies replaced."""
    graph = partitioned.graph
    live = set(graph.ends)
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        if any(name in live for name in op.outputs):
            live.update(op.inputs)
            kept.append(op)
    kept.reverse()
    made = {name for op in kept for name in op.outputs}
    tensors = {n: t for n, t in graph.tensors.items() if t.role != "activation" or n in made}
    names = {op.name for op in kept}
    return replace(
        partitioned,
        graph=graph.replace(tensors=tensors, operations=tuple(kept)),
        placements={n: p for n, p in partitioned.placements.items() if n in names},
    )
