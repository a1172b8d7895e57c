"""Cutting a logical tensor into pieces and making it again: nested digits, sections, copies and partial results."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nnscaler.layout import Invariant, Partial, Replicated, Sharded, State
from nnscaler.runtime.cut_tensors import join_pieces, piece_of, pieces_of, place_piece
from nnscaler.runtime.program.program_directory import describe_state
from nnscaler.runtime.shards import assemble, local_shape, logical_coordinates, shard, unravel
from nnscaler.runtime.tensor_bits_and_differences import bits_of, distance_of_copies, same_bits, same_values
from tests.layouts import positions

LAYOUTS: list[tuple[dict[str, State], dict[str, int], tuple[int, ...]]] = [
    ({}, {"a": 2}, (3, 4)),
    ({"a": Sharded(1)}, {"a": 4}, (3, 8)),
    ({"a": Sharded(0, 3)}, {"a": 2}, (12, 5)),
    ({"a": Sharded(0), "b": Sharded(0, 2)}, {"a": 2, "b": 3}, (12, 2)),
    ({"a": Sharded(0, 3), "b": Sharded(0)}, {"a": 2, "b": 3}, (12, 2)),
    ({"a": Sharded(0, 12), "b": Sharded(0), "c": Sharded(0, 4)}, {"a": 2, "b": 2, "c": 3}, (48,)),
    ({"a": Sharded(1, sections=(6, 2, 4)), "b": Sharded(0)}, {"a": 2, "b": 3}, (3, 12)),
    ({"a": Sharded(0), "b": Sharded(1, 2), "c": Replicated()}, {"a": 3, "b": 2, "c": 2}, (6, 8)),
    ({"a": Partial(), "b": Sharded(0)}, {"a": 3, "b": 2}, (4, 3)),
    ({"a": Partial("max"), "b": Invariant()}, {"a": 2, "b": 2}, (4,)),
    ({"a": Sharded(0, 1), "b": Sharded(0, 1)}, {"a": 1, "b": 2}, (4,)),
    ({}, {}, ()),
    ({"a": Sharded(0, sizes=(3, 1, 2)), "b": Sharded(1)}, {"a": 3, "b": 2}, (6, 4)),
    ({"a": Sharded(1, 3, (), (1, 2)), "b": Sharded(0, 1, (), (2, 3))}, {"a": 2, "b": 2}, (5, 9)),
]


def points(sizes: dict[str, int]) -> list[dict[str, int]]:
    return [dict(zip(sizes, point, strict=True)) for point in product(*(range(s) for s in sizes.values()))]


@pytest.mark.parametrize("states, sizes, shape", LAYOUTS, ids=[str(case[0]) for case in LAYOUTS])
def test_assemble_inverts_shard(states: dict[str, State], sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, dtype=torch.float64)
    pieces = [(at, shard(whole, states, sizes, at)) for at in points(sizes)]
    assert all(tuple(p.shape) == local_shape(shape, states, sizes, at) for at, p in pieces)
    assert all(p.is_contiguous() for _, p in pieces)
    made = assemble(pieces, states, sizes, shape)
    assert torch.equal(made.value, whole) and not made.differences


@pytest.mark.parametrize("states, sizes, shape", LAYOUTS, ids=[str(case[0]) for case in LAYOUTS])
def test_a_rank_holds_the_entries_whose_digits_are_its_coordinates(
    states: dict[str, State], sizes: dict[str, int], shape: tuple[int, ...]
) -> None:
    """Against the definition, which is written once more in `tests.layouts`."""
    for at in points(sizes):
        for dim, held in enumerate(logical_coordinates(shape, states, sizes, at)):
            digits = [(s, sizes[a], at[a]) for a, s in states.items() if isinstance(s, Sharded) and s.dim == dim]
            assert held.tolist() == positions(shape[dim], digits).tolist()


CUTS = [
    Sharded(1),
    Sharded(1, 3),
    Sharded(0, 2),
    Sharded(1, 1, (6, 2, 4)),
    Sharded(1, 1, (), (7, 5)),
    Sharded(1, 3, (), (1, 3)),
    Sharded(0, 2, (), (3, 1)),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_by_its_definition(cut: Sharded) -> None:
    """A piece is the entries of its rank, of contiguous tensors and of others, and all pieces make the whole again."""
    for whole in (torch.arange(8 * 12 * 2).view(8, 12, 2), torch.arange(12 * 8).view(12, 8).t()):
        pieces = pieces_of(whole, cut, 2)
        for index, piece in enumerate(pieces):
            entries = torch.from_numpy(positions(whole.shape[cut.dim], [(cut, 2, index)]))
            assert torch.equal(piece, whole.index_select(cut.dim, entries))
            assert tuple(piece.shape) == cut.shape_of(whole.shape, 2, index) == cut.shape_at(pieces[0].shape, index)
            placed = place_piece(piece, cut, 2, index)
            assert torch.equal(piece_of(placed, cut, 2, index), piece) and not piece_of(placed, cut, 2, 1 - index).any()
        assert torch.equal(join_pieces(pieces, cut), whole)


@pytest.mark.parametrize(
    "size, cut, pieces",
    [
        (12, Sharded(0), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (12, Sharded(0, 2), [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (6, Sharded(0, 1, (2, 4)), [[0, 2, 3], [1, 4, 5]]),
        (10, Sharded(0, 1, (), (7, 3)), [[*range(7)], [7, 8, 9]]),
        (6, Sharded(0, 2, (), (2, 1)), [[0, 1, 3, 4], [2, 5]]),
    ],
    ids=str,
)
def test_pieces_in_numbers(size: int, cut: Sharded, pieces: list[list[int]]) -> None:
    parts = len(pieces)
    assert [piece.tolist() for piece in pieces_of(torch.arange(size), cut, parts)] == pieces
    assert [positions(size, [(cut, parts, rank)]).tolist() for rank in range(parts)] == pieces


def test_a_cut_of_nothing() -> None:
    whole = torch.zeros(4, 0)
    pieces = pieces_of(whole, Sharded(0, 2), 2)
    assert [tuple(p.shape) for p in pieces] == [(2, 0), (2, 0)] and join_pieces(
        pieces, Sharded(0, 2)
    ).shape == whole.shape


@pytest.mark.parametrize(
    "cut",
    [
        Sharded(0),
        Sharded(0, 2),
        Sharded(0, 1, (3, 4)),
        Sharded(0, 1, (), (3, 3)),
        Sharded(0, 2, (), (2, 1)),
        Sharded(0, 1, (), (7,)),
    ],
    ids=str,
)
def test_a_cut_that_does_not_fit(cut: Sharded) -> None:
    with pytest.raises(ValueError, match="of size 7"):
        piece_of(torch.zeros(7), cut, 2, 0)


def test_an_axis_owns_the_digit_between_outer_and_inner() -> None:
    whole = torch.arange(12)
    assert shard(whole, {"a": Sharded(0)}, {"a": 3}, {"a": 1}).tolist() == [4, 5, 6, 7]
    assert shard(whole, {"a": Sharded(0, 2)}, {"a": 3}, {"a": 1}).tolist() == [2, 3, 8, 9]
    two = {"a": Sharded(0), "b": Sharded(0, 2)}
    assert shard(whole, two, {"a": 2, "b": 3}, {"a": 1, "b": 0}).tolist() == [6, 7]
    assert shard(whole, {"a": Sharded(0, sections=(8, 4))}, {"a": 2}, {"a": 1}).tolist() == [4, 5, 6, 7, 10, 11]


def test_micro_batches_are_an_axis_inside_the_data_parallel_one() -> None:
    states, sizes = {"dp": Sharded(0), "micro": Sharded(0, 2)}, {"dp": 2, "micro": 3}
    rows = [shard(torch.arange(12), states, sizes, {"dp": 1, "micro": m}).tolist() for m in range(3)]
    assert rows == [[6, 7], [8, 9], [10, 11]]


def test_logical_coordinates_are_the_indices_of_the_piece() -> None:
    states, sizes, at = {"a": Sharded(1, 2), "b": Sharded(0)}, {"a": 2, "b": 2}, {"a": 1, "b": 1}
    rows, columns = logical_coordinates((4, 8), states, sizes, at)
    assert rows.tolist() == [2, 3] and columns.tolist() == [2, 3, 6, 7]
    (single,) = logical_coordinates((8,), {"a": Sharded(0, 4)}, sizes, at)
    assert single.tolist() == [1, 3, 5, 7] and single.is_contiguous()
    whole = torch.arange(32).view(4, 8)
    assert torch.equal(whole[rows][:, columns], shard(whole, states, sizes, at))


def test_unequal_copies_are_named() -> None:
    sizes = {"a": 2, "b": 2}
    pieces = [(at, torch.zeros(2) + (0.5 if at == {"a": 1, "b": 1} else 0)) for at in points(sizes)]
    made = assemble(pieces, {"a": Sharded(0)}, sizes, (4,))
    assert [str(d) for d in made.differences] == ["copies at a=1 b=0 and a=1 b=1 differ in 2 elements, by 0.5 at most"]


@pytest.mark.parametrize("given", [(0, 0), (0,), (0, 1, 1)])
def test_each_rank_gives_one_piece(given: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"two pieces|no piece"):
        assemble([({"a": i}, torch.zeros(2)) for i in given], {"a": Sharded(0)}, {"a": 2}, (4,))


@pytest.mark.parametrize(
    "states, message",
    [
        ({"a": Sharded(0, 5)}, "does not divide"),
        ({"a": Sharded(0), "b": Sharded(0)}, "overlap"),
        ({"a": Sharded(3)}, "lacks"),
        ({"c": Sharded(0)}, "axis 'c', which the mesh lacks"),
        ({"a": Sharded(0, sections=(5, 7))}, "sections"),
        ({"a": Sharded(0, sections=(6, 6)), "b": Sharded(0, 2)}, "sections"),
    ],
)
def test_illegal_layouts(states: dict[str, State], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(torch.zeros(12), states, {"a": 2, "b": 3}, {"a": 0, "b": 0})


def test_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double()) and same_bits(torch.tensor([True]), torch.tensor([True]))
    turns = torch.tensor([1 + 2j, 3 - 1j])
    for view in (turns.conj(), turns.conj().imag, turns.conj()[0]):
        assert same_bits(view, view.resolve_conj().resolve_neg().clone()) and len(bits_of(view)) == view.nbytes
    assert not same_bits(turns, turns.conj()) and not same_bits(turns.imag, turns.conj().imag)
    first, second = describe_state({"turns": turns, "conjugate": turns.conj()}).values()
    assert first.sha256 != second.sha256


@pytest.mark.parametrize(
    "one, other, distance",
    [
        (torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.5, torch.nan, torch.inf]), (1, 0.5)),
        (torch.tensor([1.0, 2.0]), torch.tensor([torch.nan, 2.0]), (1, torch.inf)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (1, 0.0)),
        (torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j, 3 - 1j]).conj(), (2, 4.0)),
        (torch.tensor([1, 2]), torch.tensor([1.0, 4.0]), (1, 2.0)),
        (torch.zeros(0), torch.zeros(0).double(), (0, 0.0)),
    ],
    ids=["same-nan", "nan", "sign-of-zero", "complex", "other-dtype", "empty"],
)
def test_distance_of_copies(one: torch.Tensor, other: torch.Tensor, distance: tuple[int, float]) -> None:
    assert distance_of_copies(one, other) == distance == distance_of_copies(other, one)


def test_positions_are_row_major() -> None:
    assert [unravel(p, {"a": 2, "b": 3}) for p in (0, 1, 3)] == [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 0}]


def test_what_a_sparse_tensor_leaves_out_is_zero() -> None:
    eye = torch.eye(3)
    assert same_values(eye.to_sparse(), eye.to_sparse()) and same_values(eye.bool().to_sparse(), eye.bool())
    assert not same_values(eye.to_sparse(), (2 * eye).to_sparse())
