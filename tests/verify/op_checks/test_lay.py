"""Cutting and joining, against the definition and against `nnscaler.runtime.shards`, which generated programs use."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.layout import INVARIANT, PARTIAL, REPLICATED, Partial, Sharded, State
from nnscaler.runtime import shards
from tests.layouts import positions
from verify.evidence.inputs.cut_and_join_operands import gather, lay_of, local_shape, spread
from verify.evidence.split_case import uneven_sizes

SHAPE = (12, 36, 4)
STATES: tuple[State, ...] = (
    INVARIANT,
    REPLICATED,
    PARTIAL,
    Sharded(0),
    Sharded(0, 2),
    Sharded(1, 6),
    Sharded(1),
    Sharded(1, 1, (12, 24)),
    Sharded(2),
)


def tensor() -> torch.Tensor:
    return torch.randint(-9, 10, SHAPE, generator=torch.Generator().manual_seed(0)).double()


def meshes() -> list[tuple[tuple[State, ...], tuple[int, ...]]]:
    single = [((state,), (parts,)) for state in STATES for parts in (2, 3)]
    double = [(pair, (3, 2)) for pair in product(STATES, repeat=2)]
    return [(s, p) for s, p in (*single, *double) if explain_illegal(s, p, SHAPE) is None]


def by_definition(
    whole: torch.Tensor, states: tuple[State, ...], parts: tuple[int, ...], rank: tuple[int, ...]
) -> torch.Tensor:
    for dim, size in enumerate(whole.shape):
        on_dim = [
            (s, *at) for s, *at in zip(states, parts, rank, strict=True) if isinstance(s, Sharded) and s.dim == dim
        ]
        whole = whole.index_select(dim, torch.from_numpy(positions(size, on_dim)))
    return whole


@pytest.mark.parametrize(("states", "parts"), meshes(), ids=str)
def test_what_ranks_hold(states: tuple[State, ...], parts: tuple[int, ...]) -> None:
    """The same as the runtime's, but for partial sums, which it keeps on the first rank."""
    whole, lay = tensor(), lay_of(states, parts)
    pieces = spread(whole, lay, torch.Generator().manual_seed(1))
    names = [f"axis{i}" for i in range(len(parts))]
    held = {n: s for n, s in zip(names, states, strict=True) if not isinstance(s, Partial)}
    for rank, piece in zip(lay.ranks(), pieces, strict=True):
        at = dict(zip(names, rank, strict=True))
        expected = shards.shard(whole, held, dict(zip(names, parts, strict=True)), at)
        assert tuple(piece.shape) == tuple(expected.shape) == local_shape(SHAPE, lay, rank)
        if not any(isinstance(s, Partial) for s in states):
            assert torch.equal(piece, expected)
            assert torch.equal(piece, by_definition(whole, states, parts, rank))


@pytest.mark.parametrize(("states", "parts"), meshes(), ids=str)
def test_gathering_is_the_inverse(states: tuple[State, ...], parts: tuple[int, ...]) -> None:
    whole, lay = tensor(), lay_of(states, parts)
    pieces = spread(whole, lay, torch.Generator().manual_seed(1))
    value = gather(pieces, lay, torch.equal)
    assert value is not None
    assert torch.equal(value, whole)


def test_partial_sums_are_not_the_value_and_vary_in_sign() -> None:
    pieces = spread(tensor(), lay_of((PARTIAL,), (3,)), torch.Generator().manual_seed(1))
    assert not any(torch.equal(p, tensor()) for p in pieces)
    assert all(bool((p < 0).any()) and bool((p > 0).any()) for p in pieces)


def test_unequal_copies_are_no_value() -> None:
    whole = tensor()
    assert gather([whole, whole + 1], lay_of((REPLICATED,), (2,)), torch.equal) is None


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("length", [5, 6, 7, 12])
def test_uneven_ranges_cover_and_differ(length: int, parts: int) -> None:
    spans = uneven_sizes(length, parts)
    assert sum(spans) == length
    assert len(spans) == parts
    assert min(spans) >= 1
    assert len(set(spans)) > 1


@pytest.mark.parametrize("state", [Sharded(0), Sharded(1, 3)])
def test_uneven_shards(state: Sharded) -> None:
    whole = tensor()
    sizes = uneven_sizes(whole.shape[state.dim] // state.outer, 3)
    lay = lay_of((replace(state, sizes=sizes),), (3,))
    pieces = spread(whole, lay, torch.Generator())
    assert len({tuple(p.shape) for p in pieces}) > 1
    value = gather(pieces, lay, torch.equal)
    assert value is not None
    assert torch.equal(value, whole)
