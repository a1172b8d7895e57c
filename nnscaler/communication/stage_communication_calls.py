"""List the communication calls of a stage: conversions forward and backward, rotations inside of operators, messages to
other stages, the sum of the loss."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Literal

from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    Join,
    StageMessage,
    StageProgram,
    Statement,
    differentiated,
    reads,
    repeated_in_backward,
    times_of,
    writes,
)
from nnscaler.communication.cross_mesh_resharding import BlockMessage, in_micro_batch, transfer
from nnscaler.communication.parameter_layouts import gathered_again
from nnscaler.communication.statements_of_backward_halves import statement_halves
from nnscaler.ir.graph import Graph, Operation, element_bytes
from nnscaler.ir.operation_placement import Stage
from nnscaler.ir.ring_rotation_calls import ROTATE, Direction, rotations
from nnscaler.layout import SLICE, DeviceMesh, Layout, Partial, is_uneven, local_shape

# Groups of ranks and sizes of elements: the units of a program's communication profile.

Ranks = tuple[int, ...]


@lru_cache(maxsize=1024)
def groups_over(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[Ranks, ...]:
    """Return the groups of ranks of a mesh that differ on these axes only, each in the order of the mesh."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks:
        outside = tuple(index for axis, index in mesh.coordinates(rank).items() if axis not in axes)
        groups.setdefault(outside, []).append(rank)
    return tuple(map(tuple, groups.values()))


def by_bytes(
    members: Sequence[Ranks], stage: Stage, layout: Layout, shape: Sequence[int], dtype: str
) -> dict[int, tuple[Ranks, ...]]:
    """Return the groups by the bytes that a rank of them has of a tensor; by those of the largest shard in a group."""
    if not is_uneven(layout):
        return {prod(local_shape(layout, stage.sizes, shape)) * element_bytes(dtype): tuple(members)}
    found: dict[int, list[Ranks]] = {}
    for group in members:
        size = max(bytes_on(rank, stage, layout, shape, dtype) for rank in group if rank in stage.mesh.ranks)
        found.setdefault(size, []).append(group)
    return {size: tuple(groups) for size, groups in found.items()}


def bytes_on(rank: int, stage: Stage, layout: Layout, shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of the shard of one rank; of the first piece, which is the largest one, and largest slice."""
    ranks, in_time = tuple(stage.mesh.coordinates(rank).values()), stage.names[stage.first_in_time :]
    places = ((*ranks, *(index if axis == SLICE else 0 for axis in in_time)) for index in range(stage.slices))
    return max(prod(local_shape(layout, stage.sizes, shape, at)) for at in places) * element_bytes(dtype)


def ranks_text(ranks: Collection[int]) -> str:
    """`0-3`, `0, 8, 16`, `0-504 by 8`; ranks in another order than ascending are listed."""
    listed = list(ranks)
    steps = {b - a for a, b in pairwise(listed)}
    if len(listed) > 2 and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"{listed[0]}-{listed[-1]}" + (f" by {step}" if step > 1 else "")
    if len(listed) == 2 and listed[1] == listed[0] + 1:
        return f"{listed[0]}-{listed[1]}"
    return ", ".join(map(str, listed))


@dataclass(frozen=True, slots=True)
class CallClass:
    """One class of calls.

    kind        of the collective, or "send/recv"
    direction   forward, backward, recompute, parameter, gradient or loss
    phase       the instruction that makes it (F, B, I, W), or prepare, gather, gradient, loss
    stage       that calls
    axis        of the mesh
    dtype       of the tensor
    bytes       that a rank hands over; of the largest shard if they are unequal
    members     the groups, or (source, target) pairs
    module      the part of the model that causes it, layers written `*`
    where       file and line that cause it
    to_stage    the other stage of a message
    reduction   of a reducing collective
    """

    kind: str
    direction: str
    phase: str
    stage: int
    axis: str
    dtype: str
    bytes: int
    members: tuple[Ranks, ...]
    module: str
    where: str
    to_stage: int | None = None
    reduction: str = ""


Part = Literal["gather", "prepare", "forward", "backward", "recompute", "message", "scatter", "gradient", "loss"]


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in the program of a stage that makes calls of one class.

    call     the class
    times    per step, by each rank of a group
    part     of the program: `prepare`; `forward`, or what backward makes of a line of it, or computes again; a message;
             parameters gathered from where they rest; gradients divided after each backward (scatter), or summed after
             the last; the loss
    at       place in that part: the number of the statement, of the message among those that the stage sends, of the
             axis, or (step, depth) of what rests in shards
    order    by group, its number among those of the place, where a rank makes several calls there; empty: at once
    """

    call: CallClass
    times: int
    part: Part
    at: tuple[int, ...] = (0,)
    order: tuple[int, ...] = ()


Calls = tuple[CallClass, int, tuple[int, ...]]  # a class, how often one rank makes the call, the order of its groups


def calls_of_stage(communicated: CommunicatedGraph, program: StageProgram) -> Iterator[CallSite]:
    """Yield where the stage makes calls; several places may make calls of one class.

    The phase of a call in backward is the half of it, I or W.
    """
    graph, passes = communicated.partitioned.graph, program.stage.passes
    causes = _causes(program.prepare)
    for i, statement in enumerate(program.prepare):
        if isinstance(statement, Convert):
            yield from _sites("prepare", i, _conversion(graph, program, statement, "forward", "prepare", causes[i], 1))
    live = differentiated(graph, program)
    again = repeated_in_backward(graph, program.forward) if program.gradient else frozenset()
    gathered = gathered_again(graph, program)
    halves = statement_halves(graph, program)
    causes = _causes(program.forward)
    for i, statement in enumerate(program.forward):
        if isinstance(statement, Compute) and statement.circulates:
            differentiates = any(v.variable in live for v in writes(statement))
            ways: list[tuple[Part, str, bool]] = [("forward", "F", True), ("backward", "I", differentiates)]
            for part, phase, made in (*ways, ("recompute", "W" if halves[i].again else "I", i in again)):
                found = _rotations(graph, program, statement, part, phase)
                yield from _sites(part, i, found if made else ())
        if isinstance(statement, Convert):
            cause, times = causes[i], passes * times_of(statement, program.stage)
            ahead = _conversion(graph, program, statement, "forward", "F", cause, times)
            yield from _sites("forward", i, ahead)
            if statement.target.variable in live:
                half = "W" if halves[i].gradients else "I"
                back = _conversion(graph, program, statement, "backward", half, cause, times)
                yield from _sites("backward", i, back)
            if i in again or i in gathered:
                half = "W" if halves[i].again else "I"
                times *= (i in again) + (i in gathered)
                repeated = _conversion(graph, program, statement, "recompute", half, cause, times)
                yield from _sites("recompute", i, repeated)
    for i, message in enumerate(program.sends):
        yield from _sites("message", i, _message(communicated, message, passes))
    yield from loss_calls(graph, program)


def loss_calls(graph: Graph, program: StageProgram) -> Iterator[CallSite]:
    """Yield the sums of the loss, on the stage that computes it."""
    for i, found in enumerate(_loss(graph, program) if program.loss is not None else ()):
        yield from _sites("loss", i, [found])


def _sites(part: Part, at: int, found: Iterable[Calls]) -> Iterator[CallSite]:
    return (CallSite(call, times, part, (at,), order) for call, times, order in found)


def _conversion(
    graph: Graph,
    program: StageProgram,
    statement: Convert,
    direction: str,
    phase: str,
    cause: Operation | None,
    times: int,
) -> Iterator[Calls]:
    move, stage = statement.move, program.stage
    kind = move.row.backward if direction == "backward" else move.row.forward
    if kind is None or stage.sizes[move.axis] == 1:
        return
    tensor = graph.tensors[statement.source.tensor]
    given = statement.target if direction == "backward" else statement.source
    name, before = stage.names[move.axis], move.source[move.axis]
    reduction = ""
    if kind in ("all_reduce", "reduce_scatter"):
        reduction = before.reduction if isinstance(before, Partial) and direction != "backward" else "sum"
    module, where = describe_cause(cause, program)
    groups = groups_over(stage.mesh, (name,))
    for size, members in by_bytes(groups, stage, given.layout, tensor.shape, tensor.dtype).items():
        call = CallClass(
            kind, direction, phase, stage.index, name, tensor.dtype, size, members, module, where, reduction=reduction
        )
        yield call, times, ()


def _rotations(graph: Graph, program: StageProgram, statement: Compute, part: Part, phase: str) -> Iterator[Calls]:
    """Yield the calls inside of an operator that passes operands around an axis, equal ones together."""
    stage = program.stage
    module, where = describe_cause(statement.operation, program)
    found: dict[CallClass, int] = {}
    operands = [graph.tensors[v.tensor] for v in statement.inputs]
    direction: Direction = "backward" if part == "backward" else "forward"
    for turn in rotations(statement.circulates, operands, stage.sizes, direction):
        name, layout, shape = stage.names[turn.axis], statement.inputs[turn.slot].layout, operands[turn.slot].shape
        groups = groups_over(stage.mesh, (name,))
        for size, members in by_bytes(groups, stage, layout, shape, turn.dtype).items():
            call = CallClass(ROTATE, part, phase, stage.index, name, turn.dtype, size, members, module, where)
            found[call] = found.get(call, 0) + turn.times
    for call, times in found.items():
        yield call, times * stage.passes * times_of(statement, stage), ()


def _causes(statements: Sequence[Statement]) -> Mapping[int, Operation | None]:
    """Conversion -> the operation that causes it: the one that made a partial sum, else the first that reads it."""
    makers: dict[str, Operation] = {}
    readers: dict[str, Operation] = {}
    for statement in statements:
        if isinstance(statement, Compute):
            makers.update((v.variable, statement.operation) for v in statement.outputs if v is not None)
    for statement in reversed(statements):
        if isinstance(statement, Compute):
            readers.update((v.variable, statement.operation) for v in statement.inputs)
            continue
        for source, target in zip(reads(statement), writes(statement), strict=True):
            if target.variable in readers:
                readers.setdefault(source.variable, readers[target.variable])
    found: dict[int, Operation | None] = {}
    for i, statement in enumerate(statements):
        if isinstance(statement, Join):
            pairs = zip(statement.sources, statement.targets, strict=True)
            makers.update((t.variable, makers[s.variable]) for s, t in pairs)
        if not isinstance(statement, Convert):
            continue
        maker = makers.get(statement.source.variable)
        reader = readers.get(statement.target.variable)
        summed = isinstance(statement.move.source[statement.move.axis], Partial)
        found[i] = (maker or reader) if summed or reader is None else reader
        if maker is not None:
            makers.setdefault(statement.target.variable, maker)
    return found


def describe_cause(operation: Operation | None, program: StageProgram) -> tuple[str, str]:
    """(module with layer numbers written `*`, file:line)."""
    if operation is None:
        return f"stage {program.stage.index}", ""
    where = operation.where
    line = f"{os.path.basename(where.file)}:{where.line}" if where is not None else ""
    return layer_pattern(operation.module) or operation.name, line


def layer_pattern(path: str) -> str:
    """`model.layers.7.mlp` -> `model.layers.*.mlp`: one class for all layers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _message(communicated: CommunicatedGraph, message: StageMessage, times: int) -> Iterator[Calls]:
    graph = communicated.partitioned.graph
    producer, consumer = communicated.stages[message.source_stage], communicated.stages[message.target_stage]
    source, target = producer.stage, consumer.stage
    tensor = graph.tensors[message.tensor]
    computed = (s for s in consumer.forward if isinstance(s, Compute))
    reader = next((s.operation for s in computed if message.target in s.inputs), None)
    module, where = describe_cause(reader or graph.producers.get(message.tensor), consumer)
    if source.mesh.same_shape(target.mesh):
        pairs_there = tuple(zip(source.mesh.ranks, target.mesh.ranks, strict=True))
        first = [(pair[0],) for pair in pairs_there]
        sizes = by_bytes(first, source, message.source.layout, tensor.shape, tensor.dtype)
        to = dict(pairs_there)
        forward = {size: tuple((rank, to[rank], 0) for (rank,) in ranks) for size, ranks in sizes.items()}
        backward = {size: tuple((b, a, 0) for a, b, _ in found) for size, found in forward.items()}
    else:
        (shape, there), (_, here) = (
            in_micro_batch(tensor.shape, version.layout, stage)
            for version, stage in ((message.source, source), (message.target, target))
        )
        forward = _by_size(transfer(shape, source.mesh, there, target.mesh, here), tensor.dtype)
        backward = _by_size(transfer(shape, target.mesh, here, source.mesh, there), tensor.dtype)
    ways = [("forward", "F", source.index, target.index, forward)]
    if message.needs_grad:
        ways.append(("backward", "I", target.index, source.index, backward))
    for direction, phase, sender, receiver, found in ways:
        for size, messages in found.items():
            far = tuple(m for m in messages if m[0] != m[1])  # a rank keeps what it sends to itself
            if far:
                pairs = tuple((a, b) for a, b, _ in far)
                call = CallClass(
                    "send/recv", direction, phase, sender, "pp", tensor.dtype, size, pairs, module, where, receiver
                )
                yield call, times, tuple(number for _, _, number in far)


def _by_size(messages: Sequence[BlockMessage], dtype: str) -> dict[int, tuple[tuple[int, int, int], ...]]:
    """Return (source, target, number among all) of messages by their bytes."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, m in enumerate(messages):
        found.setdefault(m.elements * element_bytes(dtype), []).append((m.source, m.target, number))
    return {size: tuple(numbered) for size, numbered in found.items()}


def _loss(graph: Graph, program: StageProgram) -> Iterator[Calls]:
    stage, loss = program.stage, program.loss
    assert loss is not None
    producer = graph.producers[graph.loss]
    module, where = describe_cause(producer, program)
    tensor = graph.tensors[graph.loss]
    for axis, state in zip(stage.axes, loss.layout, strict=True):
        if isinstance(state, Partial) and axis.name in stage.mesh.names and axis.size > 1:
            size = element_bytes(tensor.dtype)
            groups = groups_over(stage.mesh, (axis.name,))
            call = CallClass(
                "all_reduce", "loss", "loss", stage.index, axis.name, tensor.dtype, size, groups, module, where,
                reduction=state.reduction,
            )  # fmt: skip
            yield call, 1, ()
