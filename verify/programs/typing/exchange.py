"""Transfers between meshes of different shape: the listed pieces, judged element by element.

The layout of the producer is known; that of the consumer follows from the pieces. Per dim, the logical indices of a
rank's shard are written out, so that a piece is right iff both ends name the same indices. A layout is looked for whose
shards are what arrives; the backward pieces then have to bring every producer the gradient of its own shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from op_registry.expression import Expression

from nnscaler.ir.layout import INVARIANT, Invariant, Layout, Sharded, State, explain_illegal, is_uneven, shape_of_rank
from nnscaler.ir.mesh import MICRO
from nnscaler.ir.operation import LogicalTensor
from nnscaler.runtime.shards import logical_coordinates, unravel
from verify.evidence.oracle.random_calls import runtime_state
from verify.programs.typing.lines.arguments import same_shape, shape_text
from verify.programs.typing.lines.uniform import NO_DIMS, Dims
from verify.programs.typing.roles.text import ExchangeText, Piece, StageText
from verify.programs.typing.typed_value import Axes, Held, Mistake, axes_of

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
    there, here = axes_of(source.axes, source.micro_batches), axes_of(stage.axes, stage.micro_batches)
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

    Micro-batches that are cut evenly lie alike: the first one shows what holds for all.
    """
    uneven = is_uneven((source_layout[-1], target_layout[-1]))
    return all(
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
    axes = axes_of(stage.axes, stage.micro_batches)
    states = {name: runtime_state(state) for name, state in zip(axes.names, layout, strict=True)}
    sizes = dict(zip(axes.names, axes.sizes, strict=True))
    result: dict[int, list[Indices]] = {}
    for position, rank in enumerate(stage.ranks):
        place = {**unravel(position, stage.axes), MICRO: micro}
        held = logical_coordinates(shape, states, sizes, place)
        result[rank] = [indices.numpy() * (dim not in uniform) for dim, indices in enumerate(held)]
    return result
