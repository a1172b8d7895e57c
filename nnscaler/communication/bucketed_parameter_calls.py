"""List the bucketed calls that gather parameters from where they rest to their leaves and take gradients back, in the
buckets that `nnscaler.runtime.training.zero_1_2_and_master_weights` and `.gradients` make.

A test holds them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from math import prod
from types import MappingProxyType

from nnscaler.communication.communicated_graph import CommunicatedGraph, StageProgram, Stored
from nnscaler.communication.parameter_layouts import RestMove, RestPhase, moves_of
from nnscaler.communication.stage_communication_calls import (
    CallClass,
    CallSite,
    Part,
    Ranks,
    bytes_on,
    groups_over,
    layer_pattern,
)
from nnscaler.communication_buckets import gathered_together, in_buckets
from nnscaler.errors import few
from nnscaler.ir.graph import element_bytes
from nnscaler.ir.operation_placement import Stage
from nnscaler.layout import Layout, is_uneven, local_shape

_DIRECTIONS = {"gather": "parameter", "B": "gradient", "gradient": "gradient"}
_PARTS: Mapping[RestPhase, Part] = MappingProxyType({"gather": "gather", "B": "scatter", "gradient": "gradient"})


@dataclass(frozen=True, slots=True)
class _ParameterShare:
    """One parameter in a call: what moves of it, and its bytes in each of the groups.

    members  the groups
    wholes   by group, bytes of the whole: what buckets are filled with
    parts    by group, bytes of the part of each rank; one number where they are equal
    late     of a sum: it begins after all backwards, for another stage adds to it, or it is divided before
    """

    fqn: str
    move: RestMove
    stage: int
    axes: tuple[str, ...]
    members: tuple[Ranks, ...]
    wholes: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    where: str
    late: bool = False


def rest_calls(communicated: CommunicatedGraph) -> Iterator[CallSite]:
    """Yield where calls are made: a place per bucket and group, on every role."""
    shared: dict[Ranks, int] = {}  # a group that spans devices is counted with the first of them
    for device, own in enumerate(map(set, communicated.partitioned.devices)):
        pieces = (piece for program in communicated.on(device) for piece in _pieces(communicated, program))
        runs = _runs(_some(piece, [not own.isdisjoint(group) for group in piece.members]) for piece in pieces)
        for run in runs:
            for bucket in _buckets(_alike(run)):
                members = tuple(group for group in bucket[0].members if shared.setdefault(group, device) == device)
                if members and len(members[0]) > 1:
                    stage = communicated.stages[bucket[0].stage].stage
                    move = bucket[0].move
                    call = replace(_call(bucket), members=members)
                    yield CallSite(call, move.times(stage), _PARTS[move.phase], _turn(move))


def _some(piece: _ParameterShare, wanted: Sequence[bool]) -> _ParameterShare:
    """Return a parameter's part in the calls of some of its groups."""
    return replace(
        piece,
        members=tuple(compress(piece.members, wanted)),
        wholes=tuple(compress(piece.wholes, wanted)),
        parts=tuple(compress(piece.parts, wanted)),
    )


def _turn(move: RestMove) -> tuple[int, int]:
    """Return the turn of a move: what is divided last is gathered first, and gradients are divided before they are
    summed."""
    if move.kind == "all_reduce":
        return 1, 0
    return 0, -move.depth if move.kind == "all_gather" else move.depth


def _pieces(communicated: CommunicatedGraph, program: StageProgram) -> Iterator[_ParameterShare]:
    graph, stage = communicated.partitioned.graph, program.stage
    for stored, move in moves_of(graph, program):
        if move.phase != "gather" and _divided_elsewhere(communicated, program, stored):
            continue
        tensor, users = graph.tensors[stored.tensor], graph.consumers[stored.tensor]
        inside = groups_over(stage.mesh, move.axes)
        wholes = _bytes(inside, stage, move.whole, tensor.shape, move.dtype)
        parts = _bytes(inside, stage, move.part, tensor.shape, move.dtype)
        members = _with_copies(communicated, stored, stage, inside) if move.kind == "all_reduce" else inside
        axes = (*move.axes, *(("pp",) if len(members[0]) > len(inside[0]) else ()))
        where = users[0][0].where if users else None
        line = f"{where.file.rpartition('/')[2]}:{where.line}" if where is not None else ""
        largest = tuple(max(sizes) for sizes in wholes)
        late = move.kind == "all_reduce" and (len(stored.copies) > 1 or bool(stored.rest))
        yield _ParameterShare(tensor.fqns[0], move, stage.index, axes, members, largest, parts, line, late)


def _divided_elsewhere(communicated: CommunicatedGraph, program: StageProgram, stored: Stored) -> bool:
    """Return whether another stage of the device divides the gradient of this one's parameter after its backwards:
    this stage has none."""
    if program.gradient or stored.scatter != "micro_batch":
        return False
    others = (communicated.stages[s] for s in stored.copies)
    own = program.stage.devices
    return any(other.gradient and not set(own).isdisjoint(other.stage.devices) for other in others)


def _bytes(
    groups: Sequence[Ranks], stage: Stage, layout: Layout, shape: tuple[int, ...], dtype: str
) -> tuple[tuple[int, ...], ...]:
    """Return, by group, the bytes that each of its ranks has of a tensor; one number where all have the same."""
    if is_uneven(layout):
        return tuple(tuple(bytes_on(rank, stage, layout, shape, dtype) for rank in group) for group in groups)
    size = element_bytes(dtype) * prod(local_shape(layout, stage.sizes, shape))
    return ((size,),) * len(groups)


def _with_copies(
    communicated: CommunicatedGraph, stored: Stored, stage: Stage, inside: tuple[Ranks, ...]
) -> tuple[Ranks, ...]:
    """Return the groups with the ranks of other stages that hold the parameter."""
    meshes = list(dict.fromkeys(communicated.stages[s].stage.mesh for s in stored.copies))
    if len(meshes) < 2:
        return inside
    positions = {rank: i for i, rank in enumerate(stage.mesh.ranks)}
    return tuple(tuple(sorted({mesh.ranks[positions[rank]] for mesh in meshes for rank in group})) for group in inside)


def _runs(pieces: Iterable[_ParameterShare]) -> list[list[_ParameterShare]]:
    """Return the pieces that may share buckets, in the order in which the runtime fills them.

    What is moved after each backward is of one stage; of the rest, a parameter that several stages of the device read
    is moved once. Values move in the order of declaration, gradients in the reverse of it, and late ones by name.
    """
    runs: dict[tuple[object, ...], dict[tuple[object, ...], _ParameterShare]] = {}
    for piece in pieces:
        move = piece.move
        key = (move.phase, move.kind, -1 if move.kind == "all_reduce" else move.depth)
        run = runs.setdefault((*key, piece.stage if move.phase == "B" else -1), {})
        run.setdefault((piece.fqn, piece.members), piece)
    return [_ordered(list(run.values()), phase == "gather") for (phase, *_), run in runs.items()]


def _ordered(run: list[_ParameterShare], values: bool) -> list[_ParameterShare]:
    late = sorted((piece for piece in run if piece.late), key=lambda piece: piece.fqn)
    return run if values else [*(piece for piece in reversed(run) if not piece.late), *late]


def _alike(pieces: Sequence[_ParameterShare]) -> list[_ParameterShare]:
    """Return the pieces, for groups apart whose ranks have other sizes of some: these fill their buckets otherwise."""
    together: dict[tuple[Ranks, ...], list[_ParameterShare]] = {}
    for piece in pieces:
        together.setdefault(piece.members, []).append(piece)
    classes: dict[tuple[Ranks, ...], list[list[int]]] = {}
    for members, found in together.items():
        positions: dict[tuple[object, ...], list[int]] = {}
        for i in range(len(members)):
            positions.setdefault(tuple((piece.wholes[i], piece.parts[i]) for piece in found), []).append(i)
        classes[members] = list(positions.values())
    return [
        _some(piece, [i in alike for i in range(len(piece.members))])
        for piece in pieces
        for alike in classes[piece.members]
    ]


def _buckets(pieces: Sequence[_ParameterShare]) -> list[list[_ParameterShare]]:
    """Return the pieces with one group and dtype that travel together, in their order."""
    buckets: list[list[_ParameterShare]] = []
    for _, run in groupby(sorted(pieces, key=_kind), key=_kind):
        found = list(run)
        fill = gathered_together if found[0].move.phase == "gather" else in_buckets
        buckets += [[found[i] for i in bucket] for bucket in fill([piece.wholes[0] for piece in found])]
    return buckets


def _kind(piece: _ParameterShare) -> tuple[tuple[Ranks, ...], str, bool]:
    return piece.members, piece.move.dtype, piece.late


def _call(bucket: Sequence[_ParameterShare]) -> CallClass:
    first = bucket[0]
    patterns = list(dict.fromkeys(layer_pattern(piece.fqn) for piece in bucket))
    module = few(patterns, 2)
    if first.move.kind == "all_gather":  # a rank hands over its own part; the largest one
        ranks = range(len(first.members[0]))
        handed = max(sum(parts[rank % len(parts)] for parts in (p.parts[0] for p in bucket)) for rank in ranks)
    else:
        handed = sum(piece.wholes[0] for piece in bucket)
    return CallClass(
        first.move.kind,
        _DIRECTIONS[first.move.phase],
        first.move.phase,
        first.stage,
        "+".join(first.axes),
        first.move.dtype,
        handed,
        first.members,
        module,
        first.where,
        reduction="" if first.move.kind == "all_gather" else "sum",
    )
