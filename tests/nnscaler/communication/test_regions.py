"""Transfers between meshes, against index sets computed by numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nnscaler.communication.cross_mesh_resharding import BlockMessage, transfer, without_axis
from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.layout import INVARIANT, Axis, DeviceMesh, Layout, Sharded, State
from tests.layouts import positions

Integers = NDArray[np.int64]
Side = tuple[DeviceMesh, Layout]
OUTERS = (1, 2, 3, 4, 6, 8, 12)


def mesh(first_rank: int, **axes: int) -> DeviceMesh:
    return DeviceMesh(
        tuple(Axis(n, s) for n, s in axes.items()), tuple(range(first_rank, first_rank + prod(axes.values())))
    )


def shard(tensor: Integers, layout: Layout, on: DeviceMesh, rank: int) -> Integers:
    """By definition: keep the indices whose digit on each axis is the rank's coordinate."""
    digits: list[list[tuple[Sharded, int, int]]] = [[] for _ in tensor.shape]
    for state, axis in zip(layout, on.axes, strict=True):
        if not isinstance(state, Sharded):
            continue
        digits[state.dim].append((state, axis.size, on.coordinates(rank)[axis.name]))
    return tensor[np.ix_(*(positions(size, found) for size, found in zip(tensor.shape, digits, strict=True)))]


def run(shape: Sequence[int], source: Side, target: Side) -> tuple[BlockMessage, ...]:
    """Carry out the transfer on numbered cells and check that every target shard is filled, each cell once."""
    messages = transfer(shape, source[0], source[1], target[0], target[1])
    assert messages == transfer(shape, source[0], source[1], target[0], target[1])
    tensor = np.arange(prod(shape), dtype=np.int64).reshape(tuple(shape))
    sent = {rank: shard(tensor, source[1], source[0], rank) for rank in source[0].ranks}
    wanted = {rank: shard(tensor, target[1], target[0], rank) for rank in target[0].ranks}
    received = {rank: np.full_like(w, -1) for rank, w in wanted.items()}
    times = {rank: np.zeros_like(w) for rank, w in wanted.items()}
    for m in messages:
        block = sent[m.source][tuple(slice(*s) for s in m.source_slices)]
        place = tuple(slice(*s) for s in m.target_slices)
        assert block.shape == received[m.target][place].shape
        assert block.size == m.elements > 0
        received[m.target][place] = block
        times[m.target][place] += 1
    for rank, w in wanted.items():
        assert (received[rank] == w).all()
        assert (times[rank] == 1).all()
    check_balance(messages, sent)
    return messages


def check_balance(messages: Sequence[BlockMessage], shards: dict[int, Integers]) -> None:
    """Of the ranks that hold the same shard, none sends more than one pair's share beyond another."""
    sent = load(messages)
    pairs: Counter[tuple[int, int]] = Counter()
    for m in messages:
        pairs[m.source, m.target] += m.elements if m.source != m.target else 0
    replicas: dict[bytes, list[int]] = {}
    for rank, cells in shards.items():
        replicas.setdefault(cells.tobytes(), []).append(rank)
    for ranks in replicas.values():
        largest = max((n for (source, _), n in pairs.items() if source in ranks), default=0)
        assert max(sent[r] for r in ranks) - min(sent[r] for r in ranks) <= largest


def load(messages: Sequence[BlockMessage]) -> Counter[int]:
    found: Counter[int] = Counter()
    for m in messages:
        found[m.source] += m.elements if m.source != m.target else 0
    return found


@st.composite
def sides(draw: st.DrawFn, shape: tuple[int, ...]) -> Side:
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=0, max_size=3).filter(lambda s: prod(s) <= 12))
    ranks = draw(st.permutations(range(prod(sizes) + 2)))[: prod(sizes)]
    states: list[State] = []
    for size in sizes:
        options: list[State] = [INVARIANT]
        for dim, n in enumerate(shape):
            options += [Sharded(dim, outer) for outer in OUTERS]
            if n % size == 0 and n >= 2 * size:
                options.append(Sharded(dim, 1, (size, n - size)))
            for outer in (o for o in (1, 2) if n % o == 0 and n // o > size > 1):
                unequal = (n // outer - (size - 1), *[1] * (size - 1))
                options += [Sharded(dim, outer, (), unequal), Sharded(dim, outer, (), unequal[::-1])]
        states.append(draw(st.sampled_from(options)))
        if explain_illegal(tuple(states), sizes[: len(states)], shape):
            states[-1] = INVARIANT
    axes = tuple(Axis(f"a{i}", size) for i, size in enumerate(sizes))
    return DeviceMesh(axes, tuple(ranks)), tuple(states)


@pytest.mark.long
@given(st.data(), st.lists(st.sampled_from([1, 2, 4, 5, 6, 7, 12, 24]), max_size=3).map(tuple))
@settings(max_examples=250, deadline=None)
def test_every_cell_arrives_once_in_both_directions(data: st.DataObject, shape: tuple[int, ...]) -> None:
    assume(prod(shape) <= 600)
    source, target = data.draw(sides(shape)), data.draw(sides(shape))
    run(shape, source, target)
    run(shape, target, source)


@pytest.mark.long
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_two_axes_on_one_dim(data: st.DataObject) -> None:
    """Mixed radix on one dim of 48: every legal pair of outers occurs."""
    ends = []
    for first_rank in (0, 3):
        on = mesh(first_rank, a=data.draw(st.sampled_from([2, 3])), b=data.draw(st.sampled_from([2, 4])))
        layouts = product([Sharded(0, outer) for outer in OUTERS], repeat=2)
        legal = [layout for layout in layouts if explain_illegal(layout, on.sizes, (48, 2)) is None]
        ends.append((on, data.draw(st.sampled_from(legal))))
    run((48, 2), ends[0], ends[1])


def test_equal_meshes_send_rank_to_rank_in_one_message() -> None:
    layout = (Sharded(0), Sharded(1, 3))
    messages = run((4, 12), (mesh(0, dp=2, tp=2), layout), (mesh(4, dp=2, tp=2), layout))
    assert [(m.source, m.target, m.source_slices) for m in messages] == [
        (rank, rank + 4, ((0, 2, 1), (0, 6, 1))) for rank in range(4)
    ]


def test_replicas_share_the_work() -> None:
    messages = run((8, 3), (mesh(0, tp=4), (INVARIANT,)), (mesh(4, tp=8), (Sharded(0),)))
    assert load(messages) == {0: 6, 1: 6, 2: 6, 3: 6}
    messages = run((8,), (mesh(0, dp=2, tp=2), (Sharded(0), INVARIANT)), (mesh(4, x=2), (INVARIANT,)))
    assert load(messages) == {0: 4, 1: 4, 2: 4, 3: 4}


def test_a_rank_in_both_meshes_copies_what_it_has() -> None:
    source, target = mesh(0, tp=4), mesh(2, tp=4)
    messages = run((8,), (source, (INVARIANT,)), (target, (INVARIANT,)))
    assert [(m.source, m.target) for m in messages] == [(2, 2), (3, 3), (0, 4), (1, 5)]
    messages = run((8,), (mesh(0, tp=2), (Sharded(0),)), (mesh(0, tp=4), (Sharded(0),)))
    assert [(m.source, m.target) for m in messages] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_strided_shards_travel_in_few_messages() -> None:
    """Packed q, k, v by head (outer 3) to whole: three blocks of each rank; every second row: one strided block."""
    messages = run((24,), (mesh(0, tp=2), (Sharded(0, 3),)), (mesh(2), ()))
    assert len(messages) == 6
    messages = run((12,), (mesh(0, tp=2), (Sharded(0, 6),)), (mesh(2), ()))
    assert [(m.source_slices, m.target_slices) for m in messages] == [
        (((0, 6, 1),), ((0, 11, 2),)),
        (((0, 6, 1),), ((1, 12, 2),)),
    ]


def test_scalars_and_unsharded_meshes() -> None:
    assert run((), (mesh(0), ()), (mesh(1, dp=2), (INVARIANT,))) == (
        BlockMessage(0, 1, (), ()),
        BlockMessage(0, 2, (), ()),
    )


def test_many_ranks_and_long_dims_are_fast() -> None:
    """Work grows with runs, not with elements."""
    layout = (Sharded(0), Sharded(1, 3))
    messages = transfer((1 << 22, 3 << 12), mesh(0, dp=8, tp=4), layout, mesh(32, dp=4, tp=2), layout)
    assert len(messages) == 8 * 4 * 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_without_axis_keeps_every_shard(data: st.DataObject) -> None:
    """Taking the micro-batches away leaves the layout of each micro-batch."""
    on = mesh(0, a=2, b=3, micro=data.draw(st.sampled_from([1, 2, 4])))
    states: list[State] = [INVARIANT, *(Sharded(0, outer) for outer in OUTERS)]
    layouts = [found for found in product(states, repeat=3) if not explain_illegal(found, on.sizes, (48, 2))]
    layout: Layout = data.draw(st.sampled_from(layouts))
    shape, rest = without_axis((48, 2), layout, on.sizes, 2)
    cells = np.arange(96, dtype=np.int64).reshape(48, 2)
    small = DeviceMesh(on.axes[:2], tuple(range(6)))
    assert explain_illegal(rest, small.sizes, shape) is None
    for coordinate in range(on.sizes[2]):
        micro = shard(cells, (INVARIANT, INVARIANT, layout[2]), on, coordinate)
        assert micro.shape == shape
        for rank in small.ranks:
            assert (shard(micro, rest, small, rank) == shard(cells, layout, on, rank * on.sizes[2] + coordinate)).all()
