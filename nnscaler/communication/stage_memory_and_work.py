"""Estimate the memory and work of every stage by a model, for a report: these are no measurements.

Memory, of one rank (of the one with the largest shards), in bytes, at the moment of the step when most is held:

* parameters: the shards of parameters, buffers and constants as they rest, and leaves that lie beside them: whole ones
  of ZeRO-1 and 2, and those of another dtype than their masters; in a stream, every version of what is trained that the
  stage keeps;
* gradients: one per trainable parameter, in float32 where the parameter is of half precision, as they are added up over
  micro-batches: like the leaf (ZeRO-1), or like the parameter at rest (ZeRO-2 and 3);
* optimizer: its states, by their bytes per element at rest;
* activations: the shards whose values backward reads, of every micro-batch between its forward and its backward, by the
  order of the schedule; of several stages of one rank, at the moment when they keep most together. A value is read by
  backward where the operator is not linear in it (`kept_inputs`); views count as the tensors that they show. Of a
  recomputed group only its inputs are kept. Of a region that runs in pieces and computes them again, its inputs, and
  what one piece keeps while it is computed again. Between the two halves of a backward it is what the second one reads:
  values that lead to gradients of parameters, recomputed ones too, and the gradients that have arrived there.

Under ZeRO-2 a backward ends with whole gradients, when the activations of its micro-batch are gone: where these are the
smaller ones, that is the moment when most is held, and the total is of it.

Not counted: scratch memory of operators, fragmentation, buffers of communication, and parameters that ZeRO-3 gathers
where they are read: of a whole, one is there at a time, and what is gathered ahead of it.

Work of a forward pass: floating point operations of matmul-like operators and elements written, of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from op_registry.registry import facts_of

from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    StageProgram,
    Statement,
    Stored,
    Version,
    again_in,
    chunk_of,
    computed_again,
    kept_inputs,
    reads,
    times_of,
    writes,
)
from nnscaler.communication.parameter_layouts import let_go
from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.communication.statements_of_backward_halves import BOTH, statement_halves
from nnscaler.ir.graph import Graph, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from nnscaler.layout import SLICE, Layout, Prefix, is_owned, local_shape
from nnscaler.manifest import StageMemory
from nnscaler.planning.sharding.parameter_and_activation_memory import (
    OPTIMIZER_BYTES,
    ParameterMemory,
    parameter_memory,
)
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import kept_at_peak


def stage_memory(
    communicated: CommunicatedGraph, schedule: Schedule, optimizer: float = OPTIMIZER_BYTES
) -> tuple[StageMemory, ...]:
    """Return the memory of every stage, on each of its devices. `optimizer`: bytes that the optimizer keeps of an
    element."""
    graph, ranks = communicated.partitioned.graph, [ranks_text(own) for own in communicated.partitioned.devices]
    kept, later, found = {}, {}, {}
    for program in communicated.stages:
        stage = program.stage
        kept[stage.index] = [kept_bytes(graph, program, index) for index in range(stage.slices)]
        later[stage.index] = kept_for_weights(graph, program)
        found[stage.index] = _memory(graph, program, schedule, optimizer, max(kept[stage.index]))
    peaks = []
    for device in range(len(ranks)):
        own = [program.stage.index for program in communicated.on(device)]
        peaks.append(kept_at_peak(schedule, device, {stage: kept[stage] for stage in own}, later))
    return tuple(
        replace(
            found[stage.index],
            role=device,
            ranks=ranks[device],
            activations=found[stage.index].activations + peaks[device][stage.index],
            total=found[stage.index].total + peaks[device][stage.index],
        )
        for stage in (program.stage for program in communicated.stages)
        for device in stage.devices
    )


def _memory(graph: Graph, program: StageProgram, schedule: Schedule, optimizer: float, each: int) -> StageMemory:
    """Return the memory of a stage without what its micro-batches keep. `each`: what one of them keeps."""
    stage = program.stage
    # shards are those of the first ranks, the largest ones; but owners hold what others do not
    places = [tuple(at) for at in product(*(range(n) if owned else (0,) for n, owned in _owned(program)))]
    held = max(
        ([_held(graph, program, stored, optimizer, at) for stored in program.stored] for at in places),
        key=lambda held: sum(one.parameters + one.gradients + one.optimizer for one in held),
    )
    parameters, gradients, states = (
        sum(getattr(one, name) for one in held) for name in ("parameters", "gradients", "optimizer")
    )
    if program.gradient and schedule.staleness:
        parameters += schedule.staleness[stage.index] * _trained_bytes(graph, program)
    arriving = sum(
        prod(local_shape(stored.leaf, stage.sizes, tensor.shape)) * element_bytes(gradient_dtype(tensor.dtype))
        for stored in program.stored
        if program.gradient and stored.rest and stored.scatter == "micro_batch" and graph.consumers[stored.tensor]
        for tensor in (graph.tensors[stored.tensor],)
    )
    piece = max(piece_bytes(graph, program).values(), default=0)
    total = parameters + gradients + states + piece + max(0, arriving - each)
    return StageMemory(stage.index, 0, "", parameters, gradients, piece, total, states)


def _trained_bytes(graph: Graph, program: StageProgram) -> int:
    """Return the bytes of one version of the parameters that are trained."""
    tensors = ((stored, graph.tensors[stored.tensor]) for stored in program.stored)
    return sum(
        _bytes(graph, stored.tensor, stored.at_rest, program)
        for stored, tensor in tensors
        if tensor.role == "parameter" and tensor.needs_grad
    )


def _owned(program: StageProgram) -> list[tuple[int, bool]]:
    """Return, for each axis, its size and whether a parameter rests on an owner there."""
    sizes = program.stage.sizes
    return [(n, any(is_owned(stored.at_rest[i]) for stored in program.stored)) for i, n in enumerate(sizes)]


def _held(
    graph: Graph, program: StageProgram, stored: Stored, optimizer: float, at: tuple[int, ...]
) -> ParameterMemory:
    tensor, sizes = graph.tensors[stored.tensor], program.stage.sizes
    return parameter_memory(
        prod(local_shape(stored.leaf, sizes, tensor.shape, at)),
        tensor.dtype,
        tensor.role == "parameter" and tensor.needs_grad,
        rest=prod(local_shape(stored.at_rest, sizes, tensor.shape, at)),
        master=tensor.master,
        divided=stored.scatter == "micro_batch",
        optimizer=optimizer,
    )


def kept_bytes(graph: Graph, program: StageProgram, index: int = 0) -> int:
    """Return the bytes that one micro-batch, or its slice of this index, keeps on a rank from its forward to its
    backward. Rows that it keeps for later slices are among them, until then."""
    stored = {*(s.variable for s in program.stored), *let_go(graph, program)}
    base: dict[str, Version] = {}
    inside: dict[str, str] = {}  # variable -> the recomputed group that makes it
    several: dict[str, int] = {}  # variable -> how many pieces make one
    kept: dict[str, int] = {}
    for i, statement in enumerate(program.forward):
        group, times = again_in(graph, program.forward, i), times_of(statement, program.stage)
        made = statement.outputs if isinstance(statement, Compute) else writes(statement)
        if isinstance(statement, Compute):
            if facts_of(statement.operation.operator).view:
                shown = base.get(statement.inputs[0].variable, statement.inputs[0])
                base.update((v.variable, shown) for v in made if v is not None)
            read = kept_inputs(graph, statement) if group is None else statement.inputs
        else:
            read = reads(statement) if group is not None or _keeps_rows(statement) else ()
        if times > 1:
            several.update((v.variable, times) for v in made if v is not None)
        if group is not None:
            inside.update((v.variable, group) for v in made if v is not None)
        for version in read:
            shown = base.get(version.variable, version)
            if shown.variable not in stored and (group is None or inside.get(shown.variable) != group):
                each = _bytes(graph, shown.tensor, shown.layout, program, index)
                kept[shown.variable] = each * several.get(shown.variable, 1)
    return sum(kept.values())


def _keeps_rows(statement: Statement) -> bool:
    return isinstance(statement, Convert) and isinstance(statement.move.target[statement.move.axis], Prefix)


def kept_for_weights(graph: Graph, program: StageProgram) -> int:
    """Return the bytes that one micro-batch keeps on a rank from the first half of its backward to the second one."""
    if not any(message.needs_grad for message in program.receives):
        return kept_bytes(graph, program)  # the first half does nothing
    halves = statement_halves(graph, program)
    stored = {s.variable for s in program.stored}  # and parameters that W is the first to read
    stored.update(variable for variable, gather in let_go(graph, program).items() if halves[gather].again)
    base: dict[str, Version] = {}
    kept: dict[str, int] = {}
    for statement, half in zip(program.forward, halves, strict=True):
        if not isinstance(statement, Compute):
            continue
        made, times = [v for v in statement.outputs if v is not None], times_of(statement, program.stage)
        if facts_of(statement.operation.operator).view:
            shown = base.get(statement.inputs[0].variable, statement.inputs[0])
            base.update((v.variable, shown) for v in made)
        for version in half.kept:
            shown = base.get(version.variable, version)
            if shown.variable not in stored:
                kept[shown.variable] = times * _bytes(graph, shown.tensor, shown.layout, program)
        for version in made if half.gradients == BOTH else ():
            kept[f"gradient of {version.variable}"] = times * _bytes(graph, version.tensor, version.layout, program)
    return sum(kept.values())


def piece_bytes(graph: Graph, program: StageProgram) -> Mapping[str, int]:
    """region -> the bytes that one of its pieces makes and keeps from its forward, in backward, to its own backward.

    Of regions whose pieces are computed again: one piece at a time holds so much. Slices of parameters do not count.
    """
    base: dict[str, Version] = {}
    inside: dict[str, str] = {}
    kept: dict[str, dict[str, int]] = {}
    for statement in program.forward:
        chunk = chunk_of(statement)
        if chunk is None or not chunk.recompute:
            continue
        of_region = kept.setdefault(chunk.name, {})
        inside.update(
            (v.variable, chunk.name) for v in writes(statement) if graph.tensors[v.tensor].role != "parameter"
        )
        if not isinstance(statement, Compute):
            continue
        if facts_of(statement.operation.operator).view:
            shown = base.get(statement.inputs[0].variable, statement.inputs[0])
            base.update((v.variable, shown) for v in writes(statement))
        for version in kept_inputs(graph, statement):
            shown = base.get(version.variable, version)
            if inside.get(shown.variable) == chunk.name:
                of_region[shown.variable] = _bytes(graph, shown.tensor, shown.layout, program)
    return {name: sum(found.values()) for name, found in kept.items()}


def _bytes(graph: Graph, tensor: str, layout: Layout, program: StageProgram, index: int = 0) -> int:
    """Return the bytes of a tensor on the rank with the largest shards, in the slice of this index."""
    described = graph.tensors[tensor]
    return prod(program.stage.shape_in_slice(layout, described.shape, index)) * element_bytes(described.dtype)


@dataclass(frozen=True, slots=True)
class StageWork:
    """Operations of one rank for one micro-batch.

    forward    floating point operations and elements written
    backward   twice the forward, and recomputation
    weights    the part of `backward` that its second half, W, does
    slices     by slice, the multiple of these, which are of its average slice, that it does; (): there are none
    """

    forward: float
    backward: float
    weights: float
    slices: tuple[float, ...] = ()


def stage_work(communicated: CommunicatedGraph, signatures: Mapping[str, Signature]) -> tuple[StageWork, ...]:
    """Return the work of every stage; at least one operation, so that every pass takes time."""
    found = []
    for program in communicated.stages:
        graph, count = communicated.partitioned.graph, program.stage.slices
        each = [_stage_work(graph, program, signatures, index) for index in range(count)]
        if count == 1:
            found += each
            continue
        forward, backward, weights = (
            sum(getattr(w, n) for w in each) / count for n in ("forward", "backward", "weights")
        )
        found.append(StageWork(forward, backward, weights, tuple(w.forward / forward for w in each)))
    return tuple(found)


def _stage_work(graph: Graph, program: StageProgram, signatures: Mapping[str, Signature], index: int) -> StageWork:
    """Return the work of one stage for the slice of this index."""
    forward = recomputed = weights = 0.0
    repeated = computed_again(graph, program.forward)
    for i, (statement, half) in enumerate(zip(program.forward, statement_halves(graph, program), strict=True)):
        if isinstance(statement, Compute):
            cost = _work(graph, program, statement, signatures, index) * times_of(statement, program.stage)
            again = cost if i in repeated else 0.0
            forward += cost
            recomputed += again
            weights += 2 * cost * half.gradients + again * half.again
    forward = max(forward, 1.0)
    return StageWork(forward, 2 * forward + recomputed, weights)


def _work(
    graph: Graph, program: StageProgram, statement: Compute, signatures: Mapping[str, Signature], index: int
) -> float:
    stage, signature = program.stage, signatures[statement.operation.name]
    choices = list(zip(statement.placement.choices[stage.index], stage.axes, strict=True))
    parts = prod(axis.size for choice, axis in choices if isinstance(choice, Split) and axis.name != SLICE)
    written = sum(
        prod(stage.shape_in_slice(v.layout, graph.tensors[v.tensor].shape, index))
        for v in statement.outputs
        if v is not None
    )
    flops = signature.flops / parts
    for choice, axis in choices:
        if isinstance(choice, Split) and axis.name == SLICE:
            flops *= _share(choice, axis.size, index)
    return flops + written


def _share(choice: Split, parts: int, index: int) -> float:
    """Return the share of an operation's products that a slice has: of its rows, with the rows up to them where it
    reads these."""
    sizes = choice.sizes or (1,) * parts
    rows, before = sizes[index] / sum(sizes), sum(sizes[: index + 1]) / sum(sizes)
    return rows * before if choice.prefix else rows
