"""Price what the stages of a program do in seconds, statement by statement, by a cost model; and the calls of a step
outside of its passes' lines: of parameters at rest, and of the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from math import ceil, prod
from typing import cast

from nnscaler.communication.bucketed_parameter_calls import rest_calls
from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    StageMessage,
    StageProgram,
    Statement,
    computed_again,
    times_of,
)
from nnscaler.communication.parameter_layouts import RestPhase, gathered_again, moves_of, parameter_gathers, rest_moves
from nnscaler.communication.stage_communication_calls import CallSite, Part, loss_calls
from nnscaler.communication.statements_of_backward_halves import StatementHalves, statement_halves
from nnscaler.communication_buckets import AHEAD_BYTES, BATCHES, SHARED_BYTES, gathered_ahead
from nnscaler.ir.conversion_table_and_paths import ConversionRow
from nnscaler.ir.graph import Graph, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Stage
from nnscaler.ir.ring_rotation_calls import Direction, as_computed, rotations
from nnscaler.layout import full_along, local_shape
from nnscaler.planning.cost.collectives import bucket_seconds
from nnscaler.planning.cost.flops_and_memory_traffic import computes_in
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, CostModel

PricedCall = tuple[CallSite, float]  # with the seconds of one call
_PARTS: tuple[Part, ...] = ("gather", "scatter", "loss", "gradient")  # in the order of a step


def in_turn(calls: Iterable[PricedCall], ranks: Collection[int]) -> Iterator[tuple[CallSite, float, float]]:
    """Yield when each call starts and ends, from 0: calls that have no rank in common run at one time."""
    clocks = dict.fromkeys(ranks, 0.0)
    for site, seconds in calls:
        own = [rank for group in site.call.members for rank in group if rank in clocks]
        start = max(clocks[rank] for rank in own)
        clocks.update(dict.fromkeys(own, start + seconds))
        yield site, start, start + seconds


def taken(calls: Iterable[PricedCall], ranks: Collection[int], part: Part, stage: int | None = None) -> float:
    """Return the seconds of the calls of one part of a program."""
    own = (c for c in calls if c[0].part == part and stage in (None, c[0].call.stage))
    return max((end for _, _, end in in_turn(own, ranks)), default=0.0)


def last_of(calls: Iterable[PricedCall], part: Part, stage: int | None = None) -> float:
    """Return the seconds of the last call of one part, which is left when all that it may lie under has run."""
    own = [seconds for site, seconds in calls if site.part == part and stage in (None, site.call.stage)]
    return own[-1] if own else 0.0


def calls_around(
    communicated: CommunicatedGraph, ranks: Sequence[Sequence[int]], cost: CostModel
) -> tuple[tuple[PricedCall, ...], ...]:
    """Return by device its calls of parameters at rest and of the loss, in the order in which it makes them."""
    device_of = {rank: device for device, own in enumerate(ranks) for rank in own}
    sites = list(rest_calls(communicated))
    for program in communicated.stages:
        sites += loss_calls(communicated.partitioned.graph, program)
    found: list[list[PricedCall]] = [[] for _ in ranks]
    for site in sorted(sites, key=lambda s: (_PARTS.index(s.part), s.at)):
        priced = (site, _call_seconds(site, cost))
        for device in sorted({device_of[rank] for group in site.call.members for rank in group}):
            found[device].append(priced)
    return tuple(map(tuple, found))


def _call_seconds(site: CallSite, cost: CostModel) -> float:
    call, ranks = site.call, sorted(site.call.members[0])
    place = AxisPlace(len(ranks), min((b - a for a, b in pairwise(ranks)), default=1))
    size = call.bytes * (len(ranks) if call.kind == "all_gather" else 1)
    seconds = cost.collective if site.part == "loss" else partial(bucket_seconds, cost)
    return seconds(cast(Collective, call.kind), size, place)


ADDING = 1.5  # a sum in place reads two tensors and writes one, where a copy reads one and writes one


@dataclass(frozen=True, slots=True)
class StagePrices:
    """Seconds of what one stage does, piece by piece: of one micro-batch, but for `prepare`.

    prepare   by statement, once a step
    forward   by statement
    backward  by statement
    again     by statement, what of it is computed, or gathered, again in backward
    halves    by statement, what of both is for W
    arriving  by message that the stage receives
    back      by message that it sends: the gradient that comes back
    divided   gradients that are divided after each backward
    added     gradients of parameters that a backward adds to those of earlier micro-batches, the mean over a step; and
              cuts, to be divided
    computed  operators of a backward, with what is computed again
    hidden    of F and of B, the part of collectives that computing hides: gathers of parameters that are begun before
              they are read, and the way back of gradients
    """

    prepare: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    halves: tuple[StatementHalves, ...]
    arriving: tuple[float, ...]
    back: tuple[float, ...]
    divided: float
    added: float
    computed: float
    hidden: tuple[float, float]

    @property
    def ahead(self) -> float:
        """Seconds of F."""
        return sum(self.forward) + sum(self.arriving) - self.hidden[0]

    @property
    def behind(self) -> float:
        """Seconds of B."""
        lines = sum(self.backward) + sum(self.again) + sum(self.back)
        return lines + self.divided + self.added - self.hidden[1]

    @property
    def weights(self) -> float:
        """Seconds of W, of those of B."""
        pieces = zip(self.halves, self.backward, self.again, strict=True)
        taken = self.divided + self.added + sum(h.gradients * behind + h.again * again for h, behind, again in pieces)
        return min(taken, self.behind)


def place_of(stage: Stage, axis: str) -> AxisPlace:
    """Return where an axis lies among the ranks of a stage: the last one varies fastest."""
    names = [a.name for a in stage.mesh.axes]
    position = names.index(axis)
    inner = prod(a.size for a in stage.mesh.axes[position + 1 :])
    return AxisPlace(stage.mesh.axes[position].size, inner)


def stage_prices(
    graph: Graph,
    program: StageProgram,
    signatures: Mapping[str, Signature],
    cost: CostModel,
    around: Iterable[PricedCall],
) -> StagePrices:
    """Price what one stage does. `around`: the calls of parameters at rest of its device."""
    stage = program.stage
    pairs, again = [], []
    repeated = computed_again(graph, program.forward)
    gathered = gathered_again(graph, program)
    begun = parameter_gathers(graph, program)
    shared = _in_shared_messages(graph, stage, begun, cost) if cost.overheads.hidden else {}  # measured over gloo
    for i, statement in enumerate(program.forward):
        times = times_of(statement, stage)
        ahead, behind = shared.get(i) or _statement(graph, stage, statement, signatures, cost)
        if i in begun:
            ahead, behind = ahead + cost.overheads.moved, behind + cost.overheads.moved
        pairs.append((ahead * times, behind * times if program.gradient else 0.0))
        if isinstance(statement, Compute):
            again.append((ahead + cost.overheads.again) * times * (i in repeated))
        else:
            again.append(ahead * times * ((i in repeated) + (i in gathered)))
    divided = taken(around, stage.mesh.ranks, "scatter", stage.index)
    computed = [isinstance(statement, Compute) for statement in program.forward]
    backwards = [b + a for (_, b), a in zip(pairs, again, strict=True)]
    ahead_of, behind_of = [pairs[i][0] for i in begun], [backwards[i] for i in begun]
    under = [sum(compress(values, computed)) for values in ([f for f, _ in pairs], backwards)]
    last = last_of(around, "scatter", stage.index) or sum(behind_of[:1])
    exposed = cost.overheads.exposed
    hidden = (
        sum(ahead_of) - exposed(sum(ahead_of), sum(ahead_of[:1]), under[0]),
        sum(behind_of) + divided - exposed(sum(behind_of) + divided, last, under[1]),
    )
    return StagePrices(
        tuple(_statement(graph, stage, statement, signatures, cost)[0] for statement in program.prepare),
        tuple(ahead for ahead, _ in pairs),
        tuple(behind for _, behind in pairs),
        tuple(again) if program.gradient else (0.0,) * len(again),
        statement_halves(graph, program),
        tuple(_sent(graph, stage, message, cost) for message in program.receives),
        tuple(_sent(graph, stage, m, cost) if m.needs_grad else 0.0 for m in program.sends),
        divided,
        _added(graph, program, cost) + cost.overheads.moved * divided_parameters(graph, program, "B"),
        under[1],
        hidden,
    )


def divided_parameters(graph: Graph, program: StageProgram, phase: RestPhase) -> int:
    """Return how many parameters are gathered from their parts in a phase, or have gradients that are divided in it."""
    return sum(move.phase == phase and move.kind != "all_reduce" for _, move in moves_of(graph, program))


def _added(graph: Graph, program: StageProgram, cost: CostModel) -> float:
    """Return the seconds in which a backward adds gradients to what earlier ones left; the first one of a step adds
    none."""
    stage, size = program.stage, 0
    for stored in program.stored:
        moves = list(rest_moves(graph, program, stored))
        tensor = graph.tensors[stored.tensor]
        if tensor.role == "parameter" and tensor.needs_grad and program.gradient:
            layout = stored.at_rest if any(move.phase == "B" for move in moves) else stored.leaf
            size += prod(local_shape(layout, stage.sizes, tensor.shape)) * element_bytes(gradient_dtype(tensor.dtype))
    return ADDING * cost.copied(size) * (stage.passes - 1) / stage.passes


def _in_shared_messages(
    graph: Graph, stage: Stage, begun: Mapping[int, Convert], cost: CostModel
) -> dict[int, tuple[float, float]]:
    """Price small parameters that the runtime gathers together, which share messages, and so do their gradients: each
    takes its share of one call for each batch, where that is less than a call of its own."""
    sizes = {i: _moved_bytes(graph, stage, statement) for i, statement in begun.items()}
    every = sum(sizes.values())
    batches = ceil(every / gathered_ahead(every)), ceil(every / (AHEAD_BYTES // BATCHES))
    small: dict[tuple[int, ConversionRow], list[int]] = {}
    for i, statement in begun.items():
        if sizes[i] <= SHARED_BYTES * place_of(stage, stage.names[statement.move.axis]).size:
            small.setdefault((statement.move.axis, statement.move.row), []).append(i)
    found: dict[int, tuple[float, float]] = {}
    for (axis, row), members in small.items():
        place, total, count = place_of(stage, stage.names[axis]), sum(sizes[i] for i in members), len(members)
        ahead, behind = (
            0.0 if kind is None else calls * cost.collective(cast(Collective, kind), total / calls, place) / count
            for kind, calls in zip((row.forward, row.backward), (min(n, count) for n in batches), strict=True)
        )
        for i in members:
            own = _convert(graph, stage, begun[i], cost)
            found[i] = min(own[0], cost.overheads.statement + ahead), min(own[1], behind)
    return found


def _moved_bytes(graph: Graph, stage: Stage, statement: Convert) -> int:
    """Return the bytes of the tensor that is converted, whole along the axis."""
    move, tensor = statement.move, graph.tensors[statement.source.tensor]
    return prod(full_along(move.source, stage.sizes, tensor.shape, move.axis)) * element_bytes(tensor.dtype)


def _statement(
    graph: Graph, stage: Stage, statement: Statement, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float]:
    """Return the seconds of a statement, once, forward and backward."""
    if isinstance(statement, Compute):
        return _compute(graph, stage, statement, signatures, cost)
    if isinstance(statement, Convert):
        return _convert(graph, stage, statement, cost)
    return cost.overheads.statement * len(statement.targets), 0.0


def _sent(graph: Graph, stage: Stage, message: StageMessage, cost: CostModel) -> float:
    """Return the seconds in which a message arrives at a stage: the tensor, or its gradient where it was made."""
    tensor, version = graph.tensors[message.tensor], message.target
    if stage.index == message.source_stage:
        version = message.source
    size = prod(local_shape(version.layout, stage.sizes, tensor.shape)) * element_bytes(tensor.dtype)
    return cost.collective("send", size, AxisPlace(2, len(stage.mesh.ranks)))


def _compute(
    graph: Graph, stage: Stage, statement: Compute, signatures: Mapping[str, Signature], cost: CostModel
) -> tuple[float, float]:
    outputs = [None if v is None else graph.tensors[v.tensor] for v in statement.outputs]
    inputs = [graph.tensors[v.tensor] for v in statement.inputs]
    layouts = as_computed(statement.circulates, [v.layout for v in statement.inputs])
    shapes_in = [local_shape(x, stage.sizes, t.shape) for x, t in zip(layouts, inputs, strict=True)]
    shapes_out = [
        None if v is None or t is None else local_shape(v.layout, stage.sizes, t.shape)
        for v, t in zip(statement.outputs, outputs, strict=True)
    ]
    dtype = computes_in(t.dtype for t in (*inputs, *outputs) if t is not None)
    signature = signatures[statement.operation.name]
    forward, backward = cost.compute(signature, shapes_in, shapes_out, dtype)
    forward += _rotated(graph, stage, statement, "forward", cost)
    if not any(t is not None and t.needs_grad for t in outputs):
        return forward, 0.0
    return forward, backward + _rotated(graph, stage, statement, "backward", cost)


def _rotated(graph: Graph, stage: Stage, statement: Compute, way: Direction, cost: CostModel) -> float:
    """Return the seconds of the calls inside of an operator, none of which the runtime hides behind computing."""
    operands, total = [graph.tensors[v.tensor] for v in statement.inputs], 0.0
    for turn in rotations(statement.circulates, operands, stage.sizes, way):
        shape = local_shape(statement.inputs[turn.slot].layout, stage.sizes, operands[turn.slot].shape)
        place = place_of(stage, stage.names[turn.axis])
        total += turn.times * cost.collective("send", prod(shape) * element_bytes(turn.dtype), place)
    return total


def _convert(graph: Graph, stage: Stage, statement: Convert, cost: CostModel) -> tuple[float, float]:
    move, tensor = statement.move, graph.tensors[statement.source.tensor]
    name = stage.names[move.axis]
    if move.axis >= stage.first_in_time:
        return 0.0, 0.0
    size = _moved_bytes(graph, stage, statement)

    def seconds(kind: str | None) -> float:
        return 0.0 if kind is None else cost.collective(cast(Collective, kind), size, place_of(stage, name))

    started = cost.overheads.statement

    return started + seconds(move.row.forward), seconds(move.row.backward) if tensor.needs_grad else 0.0
