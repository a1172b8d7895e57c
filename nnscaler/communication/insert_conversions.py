"""Insert conversions into a partitioned graph where the layouts of a producer and a consumer disagree.

Operations are walked in order. A layout that is needed and does not exist is reached from the cheapest version that
does, and every intermediate layout is a version that others may start from: conversions form a tree, so that three
projections of one activation cost one backward all_reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

from op_registry.bind_and_localise_call import localise
from op_registry.call import Call

from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    Join,
    StageMessage,
    StageProgram,
    Stored,
    Version,
    differentiated,
    times_of,
    with_gradients,
    writes,
)
from nnscaler.communication.parameter_layouts import StoredLayout, moves_of, outside_region, stored_layouts, whole
from nnscaler.communication.stage_builder import StageBuilder
from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion_table_and_paths import ConversionStep, shape_of_rank, volume
from nnscaler.ir.derive_operand_layouts import input_layouts, output_layouts, shards_of
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Chunk, PartitionedGraph, Split, Stage
from nnscaler.ir.ring_rotation_calls import ROTATE, Direction, circulation, rotations
from nnscaler.layout import INVARIANT, REPLICATED, Layout, Partial, Sharded, local_shape, rows_of, with_state

# Tensors that go to a later stage: rank to rank where the meshes have one shape, by regions where they do not.


def bring(
    builders: list[StageBuilder], target: StageBuilder, tensor: str, layout: Layout, kept: Collection[int] = ()
) -> Version:
    """Send `tensor` to the target stage, so that it has it in `layout` there.

    Between meshes of one shape every state can travel, rank to rank; the conversion is done on the side where it is
    cheaper, or split between both: among the versions that the producer has or can make, the one with the least
    volume sent plus converted is chosen. `kept`: axes in time on which it travels as the producer has it.
    """
    source = _holder(builders, target, tensor)
    if not source.stage.mesh.same_shape(target.stage.mesh):
        return _bring_by_regions(source, target, tensor, layout)
    choices: list[tuple[float, int, Version, tuple[ConversionStep, ...], Layout]] = []
    for version in source.known(tensor).values():
        for goal in dict.fromkeys((version.layout, layout)):
            for axis in kept:
                goal = with_state(goal, axis, version.layout[axis])
            made = source.path(version.layout, goal, tensor)
            rest = target.path(goal, layout, tensor)
            if made is not None and rest is not None:
                sent = prod(local_shape(goal, source.stage.sizes, source.graph.tensors[tensor].shape))
                choices.append((made[0] + sent + rest[0], len(choices), version, made[1], goal))
    if not choices:
        raise _unreachable(tensor, target)
    _, _, version, moves, goal = min(choices)
    _send(source, target, source.convert(version, moves), goal)
    return target.obtain(tensor, layout)


def _holder(builders: list[StageBuilder], target: StageBuilder, tensor: str) -> StageBuilder:
    """Return the nearest earlier stage that made the tensor itself."""
    received = {(b.stage.index, m.tensor) for b in builders for m in b.receives}
    for builder in reversed(builders[: target.stage.index]):
        if builder.known(tensor) and (builder.stage.index, tensor) not in received:
            return builder
    raise AssertionError(f"{tensor} is made by no stage before {target.stage.index}")


def _send(source: StageBuilder, target: StageBuilder, version: Version, layout: Layout) -> None:
    received = target.add(version.tensor, layout)
    # `with_gradients` says of which its gradient comes back, when all of their readers are known
    message = StageMessage(version.tensor, source.stage.index, target.stage.index, version, received, False)
    source.sends.append(message)
    target.receives.append(message)


def _bring_by_regions(source: StageBuilder, target: StageBuilder, tensor: str, layout: Layout) -> Version:
    """Only whole and sharded states of mesh axes can be cut into regions: the others are converted on either side. A
    micro-batch travels by itself, so its state on the axis of micro-batches is the same on both sides."""
    choices: list[tuple[float, int, Version, tuple[ConversionStep, ...], Layout]] = []
    for version in source.known(tensor).values():
        for over_micro_batches in dict.fromkeys((version.layout[-1], layout[-1])):
            there = (*_regular(version.layout[:-1]), over_micro_batches)
            here = (*_regular(layout[:-1]), over_micro_batches)
            made, rest = source.path(version.layout, there, tensor), target.path(here, layout, tensor)
            if made is not None and rest is not None:
                choices.append((made[0] + rest[0], len(choices), version, made[1], here))
    if not choices:
        raise _unreachable(tensor, target)
    _, _, version, moves, here = min(choices)
    _send(source, target, source.convert(version, moves), here)
    return target.obtain(tensor, layout)


def _regular(layout: Layout) -> Layout:
    return tuple(s if isinstance(s, Sharded) else INVARIANT for s in layout)


def _unreachable(tensor: str, target: StageBuilder) -> NnscalerError:
    message = f"tensor {tensor} cannot reach the layout that stage {target.stage.index} needs"
    return NnscalerError("no_conversion", message)


# How much a program communicates: calls and elements per step, per axis and collective.


def _rings(
    graph: Graph, program: StageProgram, statement: Compute, live: Collection[str], slices: range
) -> Iterator[tuple[int, int, int]]:
    """Yield what an operation passes around in each slice: the axis, the elements of the ring, how often in a pass."""
    sizes, operands = program.stage.sizes, [graph.tensors[v.tensor] for v in statement.inputs]
    ways: tuple[Direction, ...] = ("forward", "backward")
    for way in ways[: 1 + any(v.variable in live for v in writes(statement))]:
        for turn in rotations(statement.circulates, operands, sizes, way):
            layout, shape = statement.inputs[turn.slot].layout, operands[turn.slot].shape
            whole = with_state(layout, turn.axis, INVARIANT)
            yield from ((turn.axis, prod(program.stage.shape_in_slice(whole, shape, i)), turn.times) for i in slices)


def volumes(graph: Graph, programs: Iterable[StageProgram]) -> Mapping[tuple[str, str], tuple[int, float]]:
    """(axis, collective) -> (calls, elements sent by one rank) in one step: forward and backward, and what moves
    between parameters at rest and their leaves."""
    found: dict[tuple[str, str], tuple[int, float]] = {}

    def add(axis: str, collective: str | None, elements: int, parts: int, times: int) -> None:
        if collective is None or parts == 1:
            return
        calls, sent = found.get((axis, collective), (0, 0.0))
        found[axis, collective] = (calls + times, sent + times * volume(collective, elements, parts))

    for program in programs:
        sizes, names, passes = program.stage.sizes, program.stage.names, program.stage.micro_batches
        live = differentiated(graph, program)
        of_slices = range(program.stage.slices)
        for statements, times, slices in ((program.prepare, 1, range(1)), (program.forward, passes, of_slices)):
            for statement in statements:
                count = times * times_of(statement, program.stage)
                if isinstance(statement, Compute):
                    for ring, elements, turns in _rings(graph, program, statement, live, slices):
                        add(names[ring], ROTATE, elements, sizes[ring], count * turns)
                if not isinstance(statement, Convert):
                    continue
                move, tensor = statement.move, graph.tensors[statement.source.tensor]
                whole = with_state(move.source, move.axis, INVARIANT)
                for index in slices:
                    elements = prod(program.stage.shape_in_slice(whole, tensor.shape, index))
                    add(names[move.axis], move.row.forward, elements, sizes[move.axis], count)
                    if statement.target.variable in live:
                        add(names[move.axis], move.row.backward, elements, sizes[move.axis], count)
        for stored, between in moves_of(graph, program):
            elements = prod(local_shape(between.whole, sizes, graph.tensors[stored.tensor].shape))
            for axis in between.axes:
                add(axis, between.kind, elements, sizes[names.index(axis)], between.times(program.stage))
        for message in program.receives:
            each, shape = passes * (2 if message.needs_grad else 1), graph.tensors[message.tensor].shape
            for index in of_slices:
                elements = prod(program.stage.shape_in_slice(message.target.layout, shape, index))
                calls, sent = found.get(("pp", "send"), (0, 0.0))
                found["pp", "send"] = (calls + each, sent + float(each * elements))
    return found


def materialise(partitioned: PartitionedGraph, signatures: Mapping[str, Signature]) -> CommunicatedGraph:
    """Insert communication. Raises NnscalerError("no_conversion") where a layout cannot be reached."""
    graph = partitioned.graph
    stored = stored_layouts(partitioned, signatures)
    builders = [StageBuilder(graph, stage) for stage in partitioned.stages]
    for builder in builders:
        _declare_stored(builder, stored)
    regions: dict[Chunk, list[Operation]] = {}
    for op in graph.operations:
        chunk = partitioned.placements[op.name].chunk
        if chunk is not None:
            regions.setdefault(chunk, []).append(op)
    for op in graph.operations:
        placement = partitioned.placements[op.name]
        for index in placement.stages:
            _place(builders, index, partitioned, op, signatures[op.name])
            if placement.chunk is not None and regions[placement.chunk][-1] is op:
                _join(builders[index], partitioned, placement.chunk, regions[placement.chunk])
    programs: list[StageProgram] = []
    loss_stage = stage_of(partitioned, graph.loss) if graph.loss else None
    finals = {
        b.stage.index: (
            _finish_loss(b, graph) if b.stage.index == loss_stage else None,
            _finish_updates(b),
            _results(b, partitioned),
        )
        for b in builders
    }
    for builder in builders:
        loss, updates, results = finals[builder.stage.index]
        programs.append(
            StageProgram(
                builder.stage,
                tuple(builder.stored),
                tuple(builder.feeds),
                tuple(builder.prepare_feeds),
                tuple(builder.prepare),
                tuple(builder.prepared.values()),
                tuple(builder.forward),
                tuple(builder.receives),
                tuple(builder.sends),
                loss,
                updates,
                results,
            )
        )
    found = with_gradients(graph, programs)
    return CommunicatedGraph(partitioned, found, volumes(graph, found))


def _declare_stored(builder: StageBuilder, stored: Mapping[str, StoredLayout]) -> None:
    for name, layouts in stored.items():
        if builder.stage.index in layouts.stages:
            at_rest, leaf = layouts.on(builder.stage)
            version = builder.add(name, leaf)
            builder.versions[True].setdefault(name, {})[leaf] = version
            stored_so = Stored(name, version.variable, at_rest, leaf, layouts.reduce, layouts.stages, layouts.scatter)
            builder.stored.append(stored_so)


def _place(
    builders: list[StageBuilder], index: int, partitioned: PartitionedGraph, op: Operation, signature: Signature
) -> None:
    graph, builder = partitioned.graph, builders[index]
    placement = partitioned.placements[op.name]
    choices, chunk = placement.choices[index], placement.chunk
    scope = placement.prepare if chunk is None else chunk
    if chunk is not None and builder.border is None:
        builder.border = len(builder.forward)
    needed = input_layouts(graph, op, signature, choices)
    inputs = tuple(
        _obtain(builders, builder, partitioned, name, layout, placement.prepare)
        if chunk is None
        else _in_piece(builders, builder, partitioned, name, layout, chunk)
        for name, layout in zip(op.inputs, needed, strict=True)
    )
    made = output_layouts(graph, op, signature, choices)
    outputs: list[Version | None] = []
    for name, layout in zip(op.outputs, made, strict=True):
        outputs.append(None if name is None else builder.add(name, layout, scope))
    call = _localise(builder, graph, op, signature, choices, made)
    builder.emit(Compute(op, placement, call, inputs, tuple(outputs), circulation(signature, choices)), scope)
    for name, layout in zip(op.outputs, made, strict=True):
        own = tuple(map(rows_of, layout))
        if name is not None and own != layout:  # earlier slices have the other rows
            builder.obtain(name, own, scope)
            del builder.known(name, scope)[layout]


def _localise(
    builder: StageBuilder,
    graph: Graph,
    op: Operation,
    signature: Signature,
    choices: Sequence[Choice],
    made: Sequence[Layout],
) -> Call:
    """Rewrite the operation's arguments for one shard."""
    stage = builder.stage
    axes = [(a.name, a.size) for a in stage.axes]
    shards = shards_of(signature, choices, axes)
    if not shards or signature.spec is None:
        return signature.call
    shapes = tuple(
        None if name is None else shape_of_rank(layout, axes, graph.tensors[name].shape)
        for name, layout in zip(op.outputs, made, strict=True)
    )
    return localise(signature.spec, signature.call, shards, shapes)


def _obtain(
    builders: list[StageBuilder],
    builder: StageBuilder,
    partitioned: PartitionedGraph,
    name: str,
    layout: Layout,
    prepare: bool,
) -> Version:
    if not prepare and not builder.known(name) and builder.graph.tensors[name].role != "input":
        if not builder.known(name, prepare=True):
            return bring(builders, builder, name, layout, _needed_whole(partitioned, builder.stage, name))
        _pass_on(builder, name)
    return builder.obtain(name, layout, prepare)


def _needed_whole(partitioned: PartitionedGraph, stage: Stage, name: str) -> list[int]:
    """Return the axes in time over which an operation of the stage reads a tensor and is not split: a part of it would
    not do for all of its readers."""
    readers = [partitioned.placements[op.name] for op, _ in partitioned.graph.consumers[name]]
    here = [placement.choices[stage.index] for placement in readers if stage.index in placement.stages]
    axes = range(stage.first_in_time, len(stage.sizes))
    return [axis for axis in axes if any(not isinstance(choices[axis], Split) for choices in here)]


def _in_piece(
    builders: list[StageBuilder],
    builder: StageBuilder,
    partitioned: PartitionedGraph,
    name: str,
    layout: Layout,
    chunk: Chunk,
) -> Version:
    """Return a version in a piece of a region.

    What comes from outside is converted outside, once, and enters as it is: every piece has it, and autograd adds up
    the gradients that the pieces give it.
    """
    producer = builder.graph.producers.get(name)
    if producer is None or partitioned.placements[producer.name].chunk != chunk:
        stage = builder.stage
        outside = _obtain(builders, builder, partitioned, name, outside_region(layout, stage), False)
        state = REPLICATED if builder.graph.tensors[name].needs_grad else INVARIANT
        entered = with_state(outside.layout, stage.names.index(chunk.axis), state)
        builder.add(name, entered, chunk, outside.variable)
    return builder.obtain(name, layout, chunk)


def _join(builder: StageBuilder, partitioned: PartitionedGraph, chunk: Chunk, operations: Sequence[Operation]) -> None:
    """End a region: bring what is read outside of it there."""
    graph, placements = partitioned.graph, partitioned.placements
    sources: list[Version] = []
    for op in operations:
        for name in (n for n in op.outputs if n is not None):
            readers = (placements[reader.name].chunk for reader, _ in graph.consumers[name])
            if name in graph.ends or any(other != chunk for other in readers):
                sources.append(next(iter(builder.known(name, chunk).values())))
    builder.border = None
    targets = (builder.add(v.tensor, outside_region(v.layout, builder.stage)) for v in sources)
    builder.emit(Join(chunk, tuple(sources), tuple(targets)))


def _pass_on(builder: StageBuilder, name: str) -> None:
    """Make a prepared value whole, and a version of `forward`."""
    version = builder.obtain(name, whole(builder.stage), prepare=True)
    builder.prepared[name] = version
    builder.add(name, version.layout, variable=version.variable)


def stage_of(partitioned: PartitionedGraph, result: str) -> int:
    """Return the stage that returns a result: the last one that makes it."""
    producer = partitioned.graph.producers[result]
    return partitioned.placements[producer.name].stages[-1]


def _results(builder: StageBuilder, partitioned: PartitionedGraph) -> tuple[tuple[str, Version], ...]:
    """Return the results that this stage makes, as they are made: nothing is communicated for them."""
    return tuple(
        (name, next(iter(builder.known(tensor).values())))
        for name, tensor in partitioned.graph.outputs
        if stage_of(partitioned, tensor) == builder.stage.index
    )


def _finish_loss(builder: StageBuilder, graph: Graph) -> Version:
    """Convert the loss so that its gradient is one on every rank: whole or a partial sum on each axis."""
    layout = next(iter(builder.known(graph.loss)))
    final = tuple(s if isinstance(s, Partial) else INVARIANT for s in layout)
    return builder.obtain(graph.loss, final)


def _finish_updates(builder: StageBuilder) -> tuple[tuple[str, Version], ...]:
    """Convert the new values of buffers that the stage has so that they rest whole."""
    result: list[tuple[str, Version]] = []
    here = {stored.tensor for stored in builder.stored}
    for buffer, value in builder.graph.updates:
        for prepare in (True, False) if buffer in here else ():
            if builder.known(value, prepare):
                result.append((buffer, builder.obtain(value, whole(builder.stage), prepare)))
                break
    return tuple(result)
