"""Conversions: every row of the table, their cost, and paths over several axes."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from nnscaler.ir.conversion_table_and_paths import ROWS, ConversionStep, explain_illegal, find_path, move_cost, volume
from nnscaler.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Invariant,
    Layout,
    Partial,
    Prefix,
    Replicated,
    Sharded,
    State,
    local_shape,
    parse_state,
)

TABLE: list[tuple[State, State, str, str | None, str | None]] = [
    (INVARIANT, REPLICATED, "replicate", None, "all_reduce"),
    (INVARIANT, Sharded(0), "shard", None, "all_gather"),
    (INVARIANT, PARTIAL, "keep_first", None, None),
    (Sharded(0), INVARIANT, "all_gather", "all_gather", None),
    (Sharded(0), REPLICATED, "all_gather_replicated", "all_gather", "reduce_scatter"),
    (Sharded(0), Sharded(1), "all_to_all", "all_to_all", "all_to_all"),
    (Sharded(0), PARTIAL, "place", None, None),
    (PARTIAL, INVARIANT, "all_reduce", "all_reduce", None),
    (PARTIAL, REPLICATED, "all_reduce_replicated", "all_reduce", "all_reduce"),
    (PARTIAL, Sharded(0), "reduce_scatter", "reduce_scatter", "all_gather"),
    (REPLICATED, INVARIANT, "invariant", None, None),
    (REPLICATED, Sharded(0), "shard_replicated", None, None),
    (REPLICATED, PARTIAL, "keep_first_replicated", None, None),
]
# elements that a rank sends of a tensor of 48, on 4 ranks
SENT = {None: 0, "all_reduce": 72, "all_gather": 36, "reduce_scatter": 36, "all_to_all": 9}


@pytest.mark.parametrize(("before", "after", "function", "forward", "backward"), TABLE)
def test_every_row(before: State, after: State, function: str, forward: str | None, backward: str | None) -> None:
    row = ROWS[type(before), type(after)]
    assert (row.function, row.forward, row.backward) == (function, forward, backward)
    for needs_grad in (True, False):
        found = find_path((before,), (after,), (4,), (12, 4), needs_grad)
        assert found is not None
        cost, moves = found
        sent = SENT[forward] + (SENT[backward] if needs_grad else 0)
        assert cost == pytest.approx(sent, abs=0.05)
        direct = (ConversionStep(0, (before,), (after,)),)
        # over two rows where that is as cheap: a partial sum that is kept for a deferred gradient
        assert moves == direct or sum(SENT[m.row.forward] + SENT[m.row.backward] for m in moves) <= sent


def test_the_table_is_complete() -> None:
    in_time = {(Sharded, Prefix), (Prefix, Sharded)}  # `test_what_is_before_a_slice_is_there_in_time_alone`
    assert {(type(a), type(b)) for a, b, *_ in TABLE} == set(ROWS) - in_time
    states = (Invariant, Replicated, Sharded, Partial)
    missing = {(a, b) for a in states for b in states} - set(ROWS)
    assert missing == {(s, s) for s in states if s is not Sharded}


def test_what_is_before_a_slice_is_there_in_time_alone() -> None:
    source, sizes = (Sharded(1, sizes=(3, 5)),), (3, 5)
    found = find_path(source, (Prefix(1, sizes),), (2,), (4, 8), True, 0)
    assert found is not None and [move.row.function for move in found[1]] == ["append"]
    assert find_path(source, (Prefix(1, sizes),), (2,), (4, 8), True) is None
    assert find_path(source, (Prefix(1),), (2,), (4, 8), True, 0) is None
    back = find_path((Prefix(1, sizes),), source, (2,), (4, 8), True, 0)
    assert back is not None and [move.row.function for move in back[1]] == ["own_rows"]
    assert find_path((Prefix(1, sizes),), source, (2,), (4, 8), True) is None
    assert find_path((Prefix(1),), source, (2,), (4, 8), True, 0) is None
    assert local_shape((Prefix(1, sizes),), (2,), (4, 8), (0,)) == (4, 3)
    assert local_shape((Prefix(1, sizes),), (2,), (4, 8), (1,)) == (4, 8)
    assert parse_state(str(Prefix(1, sizes, True))) == Prefix(1, sizes, True)


def test_nothing_to_do_costs_nothing() -> None:
    assert find_path((Sharded(0),), (Sharded(0),), (2,), (4,), True) == (0.0, ())


def test_volume_of_one_part_is_zero() -> None:
    assert volume("all_reduce", 100, 1) == 0.0


@pytest.mark.parametrize(
    ("sizes", "source", "target"),
    [
        ((2, 2), (Sharded(0), Sharded(0, 2)), (Sharded(0, 2), Sharded(0))),
        ((2, 3), (Sharded(0), Sharded(0, 2)), (Sharded(0, 3), Sharded(0))),
        ((3, 2), (Sharded(0, 2), Sharded(0)), (Sharded(0), Sharded(0, 3))),
    ],
)
def test_axes_that_swap_places_on_a_dim_take_a_detour(sizes: tuple[int, int], source: Layout, target: Layout) -> None:
    """Neither axis can move first: the dim would have two digits in one place."""
    shape = (12, 5)
    for axis in range(2):
        first = (*source[:axis], target[axis], *source[axis + 1 :])
        assert explain_illegal(first, sizes, shape) is not None
    found = find_path(source, target, sizes, shape, True)
    assert found is not None
    moves = found[1]
    assert len(moves) > 2
    assert (moves[0].source, moves[-1].target) == (source, target)
    for before, after in pairwise(moves):
        assert before.target == after.source
    assert all(explain_illegal(m.target, sizes, shape) is None for m in moves)


def test_a_sum_is_scattered_before_it_is_gathered() -> None:
    """P, P -> S, I: the reduction over the second axis works on the smaller tensor."""
    found = find_path((PARTIAL, PARTIAL), (Sharded(0), INVARIANT), (2, 2), (8, 4), False)
    assert found is not None
    assert [m.row.function for m in found[1]] == ["reduce_scatter", "all_reduce"]


@pytest.mark.parametrize(("before", "after", "_function", "forward", "backward"), TABLE)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_micro_batches_cannot_communicate(
    before: State, after: State, _function: str, forward: str | None, backward: str | None, needs_grad: bool
) -> None:
    found = find_path((before,), (after,), (2,), (4, 4), needs_grad, in_time=0)
    silent = forward is None and (backward is None or not needs_grad)
    # by rows without communication only: there may be two of them where one does not exist
    assert (found is not None) >= silent
    if found is not None:
        assert all(not m.row.forward and not (needs_grad and m.row.backward) for m in found[1])


def test_a_maximum_can_only_be_made_whole() -> None:
    shape, sizes = (4,), (2,)
    to_whole = ConversionStep(0, (Partial("max"),), (INVARIANT,))
    assert move_cost(to_whole, sizes, shape, False, False) < inf
    for target in (REPLICATED, Sharded(0), PARTIAL):
        assert move_cost(ConversionStep(0, (Partial("max"),), (target,)), sizes, shape, False, False) == inf
    assert find_path((INVARIANT,), (Partial("max"),), sizes, shape, False) is None


def test_sections_are_not_exchanged_directly() -> None:
    """A sectioned dim is gathered before it is cut another way."""
    found = find_path((Sharded(0, sections=(4, 2)),), (Sharded(1),), (2,), (6, 4), False)
    assert found is not None
    assert [m.row.function for m in found[1]] == ["all_gather", "shard"]
