"""Plan who sends which block to whom when a tensor moves between meshes of different shape or rank count.

A rank's shard of a dim is a union of runs of logical indices; its local coordinate counts along those runs. The part
that two ranks share is the intersection of their runs, per dim, in both local coordinates. Layouts hold `Invariant`
and `Sharded` states only. The backward direction is the same function with source and target exchanged: the gradient
of an `Invariant` tensor is invariant, that of a sharded one sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.operation_placement import Stage
from nnscaler.layout import DeviceMesh, Invariant, Layout, Sharded

Slice = tuple[int, int, int]  # start, stop, step
Digits = tuple[
    tuple[Sharded, int, int], ...
]  # (state, parts, coordinate) of the axes that shard one dim, outermost first
Run = tuple[int, int]  # start, stop: logical indices
Piece = tuple[int, int, int]  # length, first local index at the source, at the target
Overlap = tuple[tuple[Slice, Slice], ...]  # pieces of one dim: where they lie at the source, and at the target


@dataclass(frozen=True, slots=True)
class BlockMessage:
    """One block that rank `source` sends to rank `target` (a local copy if they are equal).

    source          rank
    target          rank
    source_slices   one per dim, in the local coordinates of the source's shard
    target_slices   one per dim, in the local coordinates of the target's shard; they select a block of the same shape
    """

    source: int
    target: int
    source_slices: tuple[Slice, ...]
    target_slices: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        return prod(len(range(*s)) for s in self.source_slices)


def transfer(
    shape: Sequence[int], source: DeviceMesh, source_layout: Layout, target: DeviceMesh, target_layout: Layout
) -> tuple[BlockMessage, ...]:
    """Return the messages that carry a tensor of logical `shape` from one mesh and layout to another.

    Every target rank receives each cell of its shard exactly once. A rank that holds a cell itself copies it; the
    others are served by the source's replicas in turn, so that no replica sends much more than another. A pair of ranks
    has several messages where their common part is not one strided block. Sorted by target, then source, in the order
    of the meshes.
    """
    holders: dict[tuple[Digits, ...], list[int]] = defaultdict(list)
    for rank, digits in _shards(shape, source, source_layout):
        holders[digits].append(rank)
    wanted = list(_shards(shape, target, target_layout))
    found: list[tuple[int, int, BlockMessage]] = []
    for held, replicas in holders.items():
        blocks = []
        for position, (rank, digits) in enumerate(wanted):
            overlaps = [_overlap(*pair) for pair in zip(shape, held, digits, strict=True)]
            elements = prod(sum(len(range(*s)) for s, _ in overlap) for overlap in overlaps)
            if elements:
                blocks.append((elements, position, rank, overlaps))
        for position, sender, rank, overlaps in _assign(blocks, replicas):
            for pieces in product(*overlaps):
                message = BlockMessage(sender, rank, tuple(a for a, _ in pieces), tuple(b for _, b in pieces))
                found.append((position, source.ranks.index(sender), message))
    return tuple(message for _, _, message in sorted(found, key=lambda entry: entry[:2]))


def without_axis(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], axis: int
) -> tuple[tuple[int, ...], Layout]:
    """Return the logical shape and the layout that remain when one axis (`micro`, for one micro-batch) is taken
    away."""
    state = layout[axis]
    rest = [s for i, s in enumerate(layout) if i != axis]
    if not isinstance(state, Sharded):
        return tuple(shape), tuple(rest)
    smaller = tuple(size // sizes[axis] if dim == state.dim else size for dim, size in enumerate(shape))
    for i, other in enumerate(rest):
        if isinstance(other, Sharded) and other.dim == state.dim and other.outer > state.outer:
            rest[i] = replace(other, outer=other.outer // sizes[axis])
    return smaller, tuple(rest)


def in_micro_batch(shape: Sequence[int], layout: Layout, stage: Stage) -> tuple[tuple[int, ...], Layout]:
    """Return the logical shape of a micro-batch of a tensor, and its layout on the mesh of the stage."""
    of_one, rest = without_axis(shape, layout, stage.sizes, len(stage.sizes) - 1)
    return of_one, rest[: stage.first_in_time]


def _shards(shape: Sequence[int], mesh: DeviceMesh, layout: Layout) -> Iterator[tuple[int, tuple[Digits, ...]]]:
    """Yield (rank, per dim the digits that its shard fixes), in the order of the mesh. Equal digits are replicas."""
    problem = explain_illegal(layout, mesh.sizes, shape)
    assert problem is None and all(isinstance(s, Invariant | Sharded) for s in layout), (problem, layout)
    for rank in mesh.ranks:
        coordinates = mesh.coordinates(rank)
        digits: list[list[tuple[Sharded, int, int]]] = [[] for _ in shape]
        for state, axis in zip(layout, mesh.axes, strict=True):
            if isinstance(state, Sharded) and axis.size > 1:
                digits[state.dim].append((state, axis.size, coordinates[axis.name]))
        yield rank, tuple(tuple(sorted(found, key=lambda digit: digit[0].outer)) for found in digits)


def _assign(
    blocks: Sequence[tuple[int, int, int, list[Overlap]]], replicas: Sequence[int]
) -> Iterator[tuple[int, int, int, list[Overlap]]]:
    """Yield (position, sender, rank, overlaps) for blocks (elements, position, rank, overlaps) that all `replicas`
    hold.

    A replica serves itself. The others' blocks go, largest first, to the replica that sends least so far.
    """
    sent = dict.fromkeys(replicas, 0)
    for elements, position, rank, overlaps in sorted(blocks, key=lambda block: (-block[0], block[1])):
        if rank in sent:
            yield position, rank, rank, overlaps
            continue
        sender = min(replicas, key=sent.__getitem__)
        sent[sender] += elements
        yield position, sender, rank, overlaps


@lru_cache(maxsize=4096)
def _overlap(size: int, source: Digits, target: Digits) -> Overlap:
    """Return the common part of two shards of a dim, as few strided pieces."""
    return tuple(_strided(_intersect(_runs(size, source), _runs(size, target))))


@lru_cache(maxsize=4096)
def _runs(size: int, digits: Digits) -> tuple[Run, ...]:
    """Return the logical indices of a shard as ascending runs."""
    runs: list[Run] = [(0, size)]
    for state, parts, coordinate in digits:
        sections = state.sections or (size // state.outer,) * state.outer
        split: list[Run] = []
        start = 0
        for section in sections:
            sizes = state.sizes or (section // parts,) * parts
            first = start + sum(sizes[:coordinate])
            split.append((first, first + sizes[coordinate]))
            start += section
        runs = [(max(a, c), min(b, d)) for (a, b), (c, d) in _meeting(runs, split)]
    return tuple(runs)


def _meeting(first: Sequence[Run], second: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Yield every pair of runs that have an index in common, ascending. Linear in the number of runs."""
    i = j = 0
    while i < len(first) and j < len(second):
        if max(first[i][0], second[j][0]) < min(first[i][1], second[j][1]):
            yield first[i], second[j]
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1


def _intersect(source: Sequence[Run], target: Sequence[Run]) -> list[Piece]:
    """Return the common indices as pieces that are contiguous at both ends, as long as possible."""
    at_source, at_target = _local_starts(source), _local_starts(target)
    pieces: list[Piece] = []
    for a, b in _meeting(source, target):
        start, stop = max(a[0], b[0]), min(a[1], b[1])
        piece = (stop - start, at_source[a] + start - a[0], at_target[b] + start - b[0])
        if pieces and pieces[-1][1] + pieces[-1][0] == piece[1] and pieces[-1][2] + pieces[-1][0] == piece[2]:
            piece = (pieces[-1][0] + piece[0], pieces[-1][1], pieces[-1][2])
            pieces.pop()
        pieces.append(piece)
    return pieces


def _local_starts(runs: Sequence[Run]) -> dict[Run, int]:
    starts: dict[Run, int] = {}
    position = 0
    for start, stop in runs:
        starts[start, stop] = position
        position += stop - start
    return starts


def _strided(pieces: Sequence[Piece]) -> Iterator[tuple[Slice, Slice]]:
    """Yield slices that cover the pieces.

    Pieces of one length at equal distances are taken either one by one, or as one strided slice per index within a
    piece, whichever gives fewer.
    """
    i = 0
    while i < len(pieces):
        length, a, b = pieces[i]
        count = 1
        step_a = step_b = 1
        while i + count < len(pieces):
            following, before = pieces[i + count], pieces[i + count - 1]
            distance = (following[1] - before[1], following[2] - before[2])
            if following[0] != length or (count > 1 and distance != (step_a, step_b)):
                break
            step_a, step_b = distance
            count += 1
        if count <= length:
            for _, first_a, first_b in pieces[i : i + count]:
                yield (first_a, first_a + length, 1), (first_b, first_b + length, 1)
        else:
            reach = count - 1
            for k in range(length):
                yield (a + k, a + k + reach * step_a + 1, step_a), (b + k, b + k + reach * step_b + 1, step_b)
        i += count
