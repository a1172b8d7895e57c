"""Tensors that cross between stages: both sides declare the same message, and its pieces make the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from op_registry.rank_expression import Expression

from nnscaler.ir import gradients_and_kept_values
from nnscaler.ir.conversion_table_and_paths import explain_illegal, shape_of_rank
from nnscaler.ir.graph import Graph, LogicalTensor
from nnscaler.layout import INVARIANT, MICRO, SLICE, Invariant, Layout, Sharded, State, is_uneven
from nnscaler.runtime.shards import logical_coordinates, unravel
from verify.programs.typing.lines.match_call import same_shape, shape_text
from verify.programs.typing.lines.type_lines_in_order import Noted, Reading
from verify.programs.typing.lines.uniform_value_dims import NO_DIMS, Dims
from verify.programs.typing.program_files.rank_program_syntax import ExchangeText, MessageText, Piece, StageText
from verify.programs.typing.typed_value import Axes, Held, Mistake, axes_of

# Transfers between meshes of different shape: the listed pieces, judged element by element.
# The layout of the producer is known; that of the consumer follows from the pieces. Per dim, the logical indices of
# a rank's shard are written out, so that a piece is right iff both ends name the same indices. A layout is looked
# for whose shards are what arrives; the backward pieces then have to bring every producer the gradient of its own
# shard.

Indices = npt.NDArray[np.int64]
Owned = Mapping[int, Sequence[Indices]]  # rank -> per dim of the tensor the logical indices of its shard
_LARGEST = 1 << 26  # elements of a local tensor whose pieces are checked one by one


def exchanged(
    source: StageText,
    send: ExchangeText,
    stage: StageText,
    receive: ExchangeText,
    held: Held,
    tensor: LogicalTensor,
    uniform: Dims = NO_DIMS,
) -> Held:
    """Type an exchange between stages: return the layout that the consumer receives. Raises Mistake."""
    if send.messages != receive.messages or send.backward != receive.backward:
        raise Mistake(
            "communication_mismatch",
            f"the two sides of `{receive.key}` list different messages",
            "a send has no receive, or a receive no send",
            tensor.name,
        )
    there, here = axes_of(source), axes_of(stage)
    if there.sizes[-1] != here.sizes[-1]:
        raise Mistake("communication_mismatch", f"stages {source.index} and {stage.index} count other micro-batches")
    if any(not isinstance(s, Sharded | Invariant) for s in held.layout[:-1]):
        message = (
            f"`{tensor.name}` is sent as {[str(s) for s in held.layout]}, and only whole or sharded tensors can be"
        )
        raise Mistake("layouts_disagree", message, "a sum has to be taken before it is sent", tensor.name)
    given = shape_of_rank(held.layout, there.pairs, tensor.shape)
    if not same_shape(given, send.shape, there):
        told = f"is sent as {shape_text(send.shape)} and is {shape_text(given)}"
        raise Mistake("communication_mismatch", f"`{tensor.name}` {told}")
    for layout in _candidates(held, here, receive.shape, tensor):
        if _carries(receive.messages, source, held.layout, stage, layout, tensor.shape, uniform):
            if _carries(receive.backward, stage, layout, source, held.layout, tensor.shape, uniform):
                return Held(tensor.name, layout)
            raise Mistake(
                "communication_mismatch",
                f"the gradient of `{tensor.name}` does not come back to where it is needed",
                "the pieces of the backward messages are not the shards of the producers",
                tensor.name,
            )
    raise Mistake(
        "communication_mismatch",
        f"what arrives of `{tensor.name}` at stage {stage.index} is no layout of it: pieces are missing or wrong",
        "source or destination ranks, or slices, of the messages are wrong",
        tensor.name,
    )


def _candidates(held: Held, here: Axes, shape: Sequence[int | Expression], tensor: LogicalTensor) -> Iterator[Layout]:
    """Yield layouts on the consumer's mesh with that local shape. Micro-batches stay as they are."""
    micro = held.layout[-1]
    options: list[list[State]] = []
    outers = sorted({prod(o) for r in range(len(here.sizes) + 1) for o in product(here.sizes, repeat=min(r, 2))})
    if len(shape) != len(tensor.shape):
        return
    for name, parts in here.pairs[:-1]:
        states: list[State] = [INVARIANT]
        if parts > 1:
            states += _uneven(name, shape, tensor.shape)
            states += [Sharded(d, o) for d, n in enumerate(tensor.shape) for o in outers if n % (o * parts) == 0]
        options.append(states)
    for states_of in product(*options):
        layout = (*states_of, micro)
        legal = explain_illegal(layout, here.sizes, tensor.shape) is None
        if legal and same_shape(shape_of_rank(layout, here.pairs, tensor.shape), shape, here):
            yield layout


def _uneven(axis: str, shape: Sequence[int | Expression], whole: Sequence[int]) -> Iterator[Sharded]:
    """Yield the cuts over an axis that give the sizes which a local shape lists for it.

    `whole`: the shape of the whole.
    """
    for dim, size in enumerate(shape):
        table = dict(size.terms).get(axis) if isinstance(size, Expression) else None
        if isinstance(table, tuple) and sum(table) == whole[dim] and min(table) >= 0:
            common = gcd(*table)
            for outer in (n for n in range(1, common + 1) if common % n == 0):
                yield Sharded(dim, outer, (), tuple(part // outer for part in table))


def _carries(
    pieces: Sequence[Piece],
    source: StageText,
    source_layout: Layout,
    target: StageText,
    target_layout: Layout,
    shape: Sequence[int],
    uniform: Dims,
) -> bool:
    """Return whether every target rank gets each element of its shard exactly once, from where the source has it.

    Micro-batches that are cut evenly lie alike: the first one shows what holds for all. Slices go rank to rank only.
    """
    uneven = is_uneven((source_layout[-1], target_layout[-1]))
    return target.slices == 1 and all(
        _is_complete(
            pieces,
            _owned(source, source_layout, shape, uniform, micro),
            _owned(target, target_layout, shape, uniform, micro),
        )
        for micro in range(target.micro_batches if uneven else 1)
    )


def _is_complete(pieces: Sequence[Piece], there: Owned, here: Owned) -> bool:
    """Return whether every rank `here` gets each of its elements exactly once, from a rank that has it `there`."""
    got: Mapping[int, list[Piece]] = {rank: [p for p in pieces if p[1] == rank] for rank in here}
    if len(pieces) != sum(map(len, got.values())) or any(p[0] not in there for p in pieces):
        return False
    for rank, indices in here.items():
        if prod(len(i) for i in indices) > _LARGEST:
            return False
        seen = np.zeros([len(i) for i in indices], dtype=np.int8)  # [elements of the shard]: how often each arrives
        for origin, _, from_slices, to_slices in got[rank]:
            if len(from_slices) != len(indices) or len(to_slices) != len(indices):
                return False
            for own, wanted, cut, put in zip(there[origin], indices, from_slices, to_slices, strict=True):
                if not _inside(cut, len(own)) or not _inside(put, len(wanted)):
                    return False
                if not np.array_equal(own[slice(*cut)], wanted[slice(*put)]):
                    return False
            seen[tuple(slice(*s) for s in to_slices)] += 1
        if not (seen == 1).all():
            return False
    return True


def _inside(piece: tuple[int, int, int], size: int) -> bool:
    """Return whether a slice is in range: tensors have no negative steps, and messages no open ends."""
    whole = len(piece) == 3 and all(type(n) is int for n in piece)
    return whole and 0 <= piece[0] < piece[1] <= size and piece[2] >= 1


def _owned(stage: StageText, layout: Layout, shape: Sequence[int], uniform: Dims, micro: int) -> Owned:
    """Return what each rank of a stage holds in one micro-batch. All indices of a uniform dim are 0."""
    axes = axes_of(stage)
    states = dict(zip(axes.names, layout, strict=True))
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    result: dict[int, list[Indices]] = {}
    for position, rank in enumerate(stage.ranks):
        place = {**unravel(position, stage.axes), **dict.fromkeys((*stage.time_axes, SLICE), 0), MICRO: micro}
        held = logical_coordinates(shape, states, sizes, place)
        result[rank] = [indices.numpy() * (dim not in uniform) for dim, indices in enumerate(held)]
    return result


Message = MessageText | ExchangeText


def arrivals(
    stage: StageText,
    readings: Mapping[int, Reading],
    stages: Mapping[int, StageText],
    graph: Graph,
    uniform: Mapping[str, Dims],
) -> tuple[dict[str, Held | None], list[Noted]]:
    """Type each receiving variable of the stage; return the types, and the mistakes found."""
    found: dict[str, Held | None] = {}
    noted: list[Noted] = []
    for receive in stage.receives:
        found[receive.variable] = None
        try:
            found[receive.variable] = _arrival(stage, receive, readings, stages, graph, uniform)
        except Mistake as mistake:
            noted.append(Noted(stage, receive.number, mistake))
    return found, noted


def _arrival(
    stage: StageText,
    receive: Message,
    readings: Mapping[int, Reading],
    stages: Mapping[int, StageText],
    graph: Graph,
    uniform: Mapping[str, Dims],
) -> Held | None:
    source = stages.get(receive.stage)
    if source is None or source.index not in readings:
        raise Mistake(
            "deadlock",
            f"stage {stage.index} waits for `{receive.key}` of stage {receive.stage}, which does not come before it",
        )
    sends = [s for s in source.sends if s.key == receive.key and s.stage == stage.index]
    if len(sends) != 1 or isinstance(sends[0], ExchangeText) != isinstance(receive, ExchangeText):
        raise Mistake(
            "communication_mismatch",
            f"stage {stage.index} receives `{receive.key}`, and stage {source.index} sends it {len(sends)} times",
            "the receiver waits for ever" if not sends else None,
        )
    held = readings[source.index].returned.get(receive.key)
    if receive.key not in readings[source.index].returned:
        raise Mistake("communication_mismatch", f"stage {source.index} sends `{receive.key}` and does not return it")
    if held is None:
        return None
    send, tensor = sends[0], graph.tensors[held.tensor]
    if send.needs_grad != receive.needs_grad or (send.needs_grad and not tensor.needs_grad):
        raise _wrong_gradient(send, receive, tensor)
    if receive.dtype != tensor.dtype:
        message = f"`{tensor.name}` is {tensor.dtype}, and stage {stage.index} receives {receive.dtype}"
        raise Mistake("communication_mismatch", message, "the dtypes of the two sides differ", tensor.name)
    if isinstance(send, ExchangeText) and isinstance(receive, ExchangeText):
        return exchanged(source, send, stage, receive, held, tensor, uniform.get(tensor.name, NO_DIMS))
    assert isinstance(send, MessageText) and isinstance(receive, MessageText)
    return _to_same_position(source, send, stage, receive, held, tensor.shape)


def _wrong_gradient(send: Message, receive: Message, tensor: LogicalTensor) -> Mistake:
    message = (
        f"`{tensor.name}` {'needs a' if tensor.needs_grad else 'has no'} gradient; it is sent with "
        f"needs_grad={send.needs_grad} and received with needs_grad={receive.needs_grad}"
    )
    cause = "its gradient is not sent back" if tensor.needs_grad else "a gradient is waited for that nobody sends"
    return Mistake("communication_mismatch", message, cause, tensor.name)


def check_gradients(readings: Mapping[int, Reading], graph: Graph) -> list[Noted]:
    """Check that the gradient of a message goes back where its reader has one; return the mistakes.

    The reader has one where the loss, or something whose gradient comes back to it, depends on the tensor through lines
    that record gradients. A gradient of zeros that goes back as well is wrong only where no backward sends it: then the
    schedule comes to a halt.
    """
    noted: list[Noted] = []
    for reading in readings.values():
        live = _differentiated(reading, graph)
        for receive in reading.stage.receives:
            source = readings.get(receive.stage)
            held = None if source is None else source.returned.get(receive.key)
            if source is None or held is None or receive.needs_grad or held.tensor not in live:
                continue
            for send in source.stage.sends:
                if (send.key, send.stage, send.needs_grad) == (receive.key, reading.stage.index, False):
                    wrong = _wrong_gradient(send, receive, graph.tensors[held.tensor])
                    noted.append(Noted(reading.stage, receive.number, wrong))
    return noted


def _differentiated(reading: Reading, graph: Graph) -> frozenset[str]:
    """Return the logical tensors of a stage from which its loss, or a gradient that comes back to it, is reached."""
    stage = reading.stage
    sent = [reading.returned.get(send.key) for send in stage.sends if send.needs_grad]
    roots = {held.tensor for held in sent if held is not None} | ({graph.loss} if stage.loss is not None else set())

    def needing(names: Iterable[str | None]) -> list[str]:
        return [name for name in names if name is not None and graph.tensors[name].needs_grad]

    lines = [
        (needing(op.outputs), needing(op.inputs))
        for op in graph.operations
        if op.name in reading.operations and gradients_and_kept_values.records(graph, op)
    ]
    return gradients_and_kept_values.differentiated(lines, roots)


def _to_same_position(
    source: StageText, send: MessageText, stage: StageText, receive: MessageText, held: Held, shape: Sequence[int]
) -> Held:
    """Type a transfer between meshes of one shape, rank to rank: the layout stays."""
    here = axes_of(stage)
    same_sizes = axes_of(source).sizes == here.sizes
    plain = send.peers == stage.ranks and receive.peers == source.ranks
    if not plain and not (same_sizes and _keep_shards(source, send, stage, receive, held)):
        raise Mistake(
            "communication_mismatch",
            f"`{held.tensor}` goes from the ranks {_few(source.ranks)} to {_few(send.peers)}, and the ranks "
            f"{_few(stage.ranks)} expect it from {_few(receive.peers)}",
            "source and destination ranks of the messages are not those of the stages, position by position",
            held.tensor,
        )
    if not same_sizes:
        raise Mistake(
            "communication_mismatch",
            f"`{held.tensor}` goes rank to rank between meshes of the shapes {source.axes} and {stage.axes}",
            tensor=held.tensor,
        )
    local = shape_of_rank(held.layout, here.pairs, shape)
    if not same_shape(local, receive.shape, here):
        raise Mistake(
            "communication_mismatch",
            f"stage {stage.index} receives `{held.tensor}` as {shape_text(receive.shape)}, and what is sent has shape "
            f"{shape_text(local)}",
            "the shapes of the two sides differ",
            held.tensor,
        )
    return held


def _keep_shards(source: StageText, send: MessageText, stage: StageText, receive: MessageText, held: Held) -> bool:
    """Return whether every rank gets its tensor from a rank that sends it there, and that has the same: it stands
    elsewhere on axes alone over which value and gradient are whole and equal on all ranks."""
    if sorted(send.peers) != sorted(stage.ranks) or len(receive.peers) != len(stage.ranks):
        return False
    states = dict(zip(axes_of(source).names, held.layout, strict=True))
    kept = [number for number, axis in enumerate(source.axes) if not isinstance(states[axis], Invariant)]
    for position, (rank, expected) in enumerate(zip(stage.ranks, receive.peers, strict=True)):
        origin = send.peers.index(rank)
        there = tuple(unravel(origin, source.axes).values())
        here = tuple(unravel(position, stage.axes).values())
        if source.ranks[origin] != expected or any(there[axis] != here[axis] for axis in kept):
            return False
    return True


def check_sends(stages: Mapping[int, StageText]) -> tuple[int, list[Noted]]:
    """Check that every send has its receive; return the number of sends, and the mistakes."""
    noted: list[Noted] = []
    count = 0
    for stage in stages.values():
        seen: set[tuple[str, int]] = set()
        for send in stage.sends:
            count += 1
            if send.key not in stage.forward.returned:
                message = f"stage {stage.index} sends `{send.key}`, which its forward does not return"
                noted.append(Noted(stage, send.number, Mistake("communication_mismatch", message)))
            target = stages.get(send.stage)
            wanted = (
                [] if target is None else [r for r in target.receives if (r.key, r.stage) == (send.key, stage.index)]
            )
            if len(wanted) != 1 or (send.key, send.stage) in seen:
                times = f"which receives it {len(wanted)} times"
                message = f"stage {stage.index} sends `{send.key}` to stage {send.stage}, {times}"
                noted.append(Noted(stage, send.number, Mistake("communication_mismatch", message)))
            seen.add((send.key, send.stage))
    return count, noted


def _few(ranks: Sequence[int]) -> str:
    """List ranks, the first ones of many."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}{', ...' if len(ranks) > 8 else ''})"
