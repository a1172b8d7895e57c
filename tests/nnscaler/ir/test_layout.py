"""Layouts: which are legal, local shapes and outers, and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_registry.rank_expression import Expression

from nnscaler.ir.conversion_table_and_paths import explain_illegal, shape_of_rank
from nnscaler.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Axis,
    DeviceMesh,
    Layout,
    Partial,
    Sharded,
    State,
    format_layout,
    full_along,
    gradient_state,
    intervals_nest,
    local_outer,
    local_shape,
    parse_state,
    without_gradient,
)
from tests.layouts import gradient_of

LEGAL: list[tuple[Layout, tuple[int, ...], tuple[int, ...]]] = [
    ((Sharded(0), Sharded(1)), (2, 3), (4, 9)),
    ((Sharded(0), Sharded(0, 2)), (2, 3), (12,)),
    ((Sharded(0, 3), Sharded(0)), (2, 3), (12,)),  # axes have no order
    ((Sharded(0, 4), Sharded(0)), (3, 2), (12,)),  # a gap between the intervals
    ((Sharded(0, sections=(4, 2, 2)), Sharded(1)), (2, 5), (8, 5)),
    ((PARTIAL, REPLICATED, INVARIANT), (2, 2, 2), ()),
    ((Sharded(0, sizes=(3, 1, 3)), Sharded(1)), (3, 2), (7, 4)),
    ((Sharded(0, 2, sizes=(3, 2)), Sharded(1, sizes=(1, 2, 2))), (2, 3), (10, 5)),
]
ILLEGAL: list[tuple[Layout, tuple[int, ...], tuple[int, ...], str]] = [
    ((Sharded(1),), (2,), (4,), "dim 1 of a tensor with 1 dims"),
    ((Sharded(0),), (3,), (8,), "dim 0 of size 8 does not divide by 1 x 3"),
    ((Sharded(0, 4),), (3,), (18,), "dim 0 of size 18 does not divide by 4 x 3"),
    ((Sharded(0), Sharded(0)), (2, 2), (8,), "two axes overlap on dim 0"),
    ((Sharded(0, 2), Sharded(0)), (2, 3), (24,), "two axes overlap on dim 0"),
    ((Sharded(0, sections=(4, 3)),), (2,), (7,), "sections (4, 3) of dim 0 (size 7) do not divide by 2"),
    ((Sharded(0, sections=(4, 4)), Sharded(0, 2)), (2, 2), (8,), "a second axis on the sectioned dim 0"),
    ((Sharded(0, sections=(6, 3)), Sharded(0, 3, sizes=(1, 2))), (3, 2), (9,), "a second axis on the sectioned dim 0"),
    ((Sharded(0, sizes=(4, 3)),), (3,), (7,), "dim 0: 2 sizes for 3 parts"),
    ((Sharded(0, sizes=(4, 3)),), (2,), (8,), "dim 0: the sizes (4, 3) do not add up to 8"),
    ((Sharded(0, 2, sizes=(4, 3)),), (2,), (7,), "dim 0: the sizes (4, 3) in 2 blocks do not add up to 7"),
    ((Sharded(0, sizes=(4, 4)),), (2,), (8,), "dim 0: the sizes (4, 4) are equal, which is said without sizes"),
    ((Sharded(0, sizes=(7, 7, 0)),), (3,), (7,), "dim 0: the sizes (7, 7, 0) do not add up to 7"),
    ((Sharded(0, sizes=(7, 0)),), (2,), (7,), "dim 0: the sizes (7, 0) leave a rank without elements"),
    ((Sharded(0, sizes=(5, 3)), Sharded(0, 4)), (2, 2), (8,), "a second axis on the unevenly cut dim 0"),
]


@pytest.mark.parametrize(("layout", "sizes", "shape"), LEGAL)
def test_legal(layout: Layout, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert explain_illegal(layout, sizes, shape) is None


@pytest.mark.parametrize(("layout", "sizes", "shape", "reason"), ILLEGAL)
def test_illegal_says_why(layout: Layout, sizes: tuple[int, ...], shape: tuple[int, ...], reason: str) -> None:
    assert explain_illegal(layout, sizes, shape) == reason


@given(*[st.integers(1, 12)] * 4)
def test_nesting_does_not_depend_on_the_order_of_axes(a: int, p: int, b: int, q: int) -> None:
    assert intervals_nest(a, p, b, q) == intervals_nest(b, q, a, p)


def test_local_shape_divides_by_every_axis_of_a_dim() -> None:
    layout = (Sharded(1), Sharded(1, 2), Partial())
    assert local_shape(layout, (2, 3, 4), (5, 12)) == (5, 2)


def test_unequal_shards_have_a_shape_on_each_rank() -> None:
    layout, axes = (Sharded(0, 2, sizes=(2, 4)), Sharded(1)), (("dp", 2), ("tp", 3))
    assert local_shape(layout, (2, 3), (12, 6)) == (8, 2)  # of the largest
    assert [local_shape(layout, (2, 3), (12, 6), (dp, 0)) for dp in (0, 1)] == [(4, 2), (8, 2)]
    rows, columns = shape_of_rank(layout, axes, (12, 6))
    assert isinstance(rows, Expression) and columns == 2
    assert [rows.evaluate({"dp": dp}) for dp in (0, 1)] == [4, 8]
    assert full_along(layout, (2, 3), (12, 6), 0) == (12, 2)


def test_local_outer_leaves_out_the_axes_with_smaller_outer() -> None:
    layout = (Sharded(0), Sharded(0, 6), Sharded(0, 2))
    assert [local_outer(layout, (2, 2, 3), axis) for axis in range(3)] == [1, 1, 1]
    assert local_outer((Sharded(0), Sharded(0, 6)), (2, 2), 1) == 3


def test_without_gradient_replicated_is_invariant() -> None:
    assert without_gradient((REPLICATED, PARTIAL, Sharded(0))) == (INVARIANT, PARTIAL, Sharded(0))


@pytest.mark.parametrize(
    "state",
    [
        INVARIANT,
        REPLICATED,
        PARTIAL,
        Partial("max"),
        Sharded(2),
        Sharded(0, 6),
        Sharded(1, sections=(48, 24, 24)),
        Sharded(0, sizes=(5, 4)),
        Sharded(2, 3, sizes=(1, 2, 1)),
    ],
)
def test_text_reads_back(state: State) -> None:
    assert parse_state(str(state)) == state


def test_text() -> None:
    assert (
        format_layout((INVARIANT, Sharded(0, 3), Partial()), ("dp", "tp", "sp"))
        == "tp: Sharded(0, outer=3), sp: Partial()"
    )
    with pytest.raises(ValueError, match="not a layout state: 'Shard'"):
        parse_state("Shard")


def test_mesh_coordinates_are_row_major() -> None:
    mesh = DeviceMesh((Axis("a", 2), Axis("b", 3)), (6, 7, 8, 9, 10, 11))
    assert mesh.coordinates(10) == {"a": 1, "b": 1}
    assert [mesh.coordinates(r)["b"] for r in mesh.ranks] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="not in"):
        mesh.coordinates(3)


@pytest.mark.parametrize("state", [INVARIANT, REPLICATED, PARTIAL, Sharded(0, 2), Sharded(1, 1, (4, 2))], ids=str)
def test_a_gradient_pairs_with_its_value(state: State) -> None:
    """The gradient's own gradient is the value: the two are exchanged twice."""
    assert gradient_state(state) == gradient_of(state)
    assert gradient_state(gradient_state(state)) == state
