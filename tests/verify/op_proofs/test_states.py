"""States, sizes and guards: what dimension types are made of."""

from __future__ import annotations

import pytest
import sympy
import torch
from sympy import Symbol

from tests.verify.op_proofs.rule_harness import Sized, conclude_on
from verify.evidence.dimension_types.check_size_guards_on_shards import reduced
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    ZERO,
    Shard,
    State,
    Unknown,
    checked,
    equal,
    join,
    mentions,
    quotient,
)

K, M, N = (Symbol(name, integer=True, positive=True) for name in "kmn")
SPLIT = frozenset({K})
ATEN = torch.ops.aten


def _f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def test_quotients_are_whole_for_all_sizes() -> None:
    assert quotient(M * N, N) == M
    assert quotient(12, 4) == 3
    assert quotient(6 * M, 2) == 3 * M
    assert quotient(M, 2) is None
    assert quotient(M, N) is None
    assert quotient((M + N) * K, M + N) == K
    assert equal(M * (N + 1), M * N + M)
    assert mentions([3, (M, K * 2)], SPLIT)
    assert not mentions("k", SPLIT)


@pytest.mark.parametrize(
    ("state", "sizes", "holds"),
    [
        (Shard(0), (K, M), True),
        (Shard(1), (K, M), False),
        (Shard(0), (K, K), False),
        (Shard(0, M), (M * K * 3, N), True),
        (Shard(0, M), (K * 3, N), False),
        (Shard(0, K), (K * K,), False),
        (Shard(0), (K + 1,), False),
        (Shard(0, 1, (K, 2 * K)), (3 * K,), True),
        (Shard(0, 1, (K, M)), (K + M,), False),
        (SAME, (M, N), True),
        (SAME, (M, K), False),
        (PARTIAL_SUM, (K,), False),
        (CONSTANT, (K, K), True),
    ],
)
def test_a_state_fits_its_sizes_or_is_unknown(state: State, sizes: tuple[object, ...], holds: bool) -> None:
    assert (checked(state, sizes, SPLIT) == state) == holds


def test_two_shards_are_read_together_only_if_they_hold_the_same_part() -> None:
    assert join(Shard(0, None), Shard(0, M)) == Shard(0, M)
    assert join(Shard(0, 1), Shard(0, 2)) is None
    assert join(Shard(0, 1, (K, M)), Shard(0, 1)) is None


def test_guards_lose_common_factors() -> None:
    assert reduced(sympy.Ne(K * M, K)) == sympy.Ne(M, 1)
    assert reduced(sympy.Eq(M, 2)) == sympy.Eq(M, 2)


_IDS = torch.zeros(3, 5, dtype=torch.int64)
CONCLUSIONS: list[tuple[object, list[object], list[State], State]] = [
    (ATEN.mm.default, [_f(5, 12), _f(12, 7)], [Shard(1), Shard(0)], PARTIAL_SUM),
    (ATEN.mm.default, [_f(5, 24), _f(24, 7)], [Shard(1), Shard(0, 2)], Unknown()),
    (ATEN.mm.default, [_f(5, 4), _f(4, 7)], [PARTIAL_SUM, PARTIAL_SUM], Unknown()),
    (ATEN.view.default, [_f(5, 24), Sized(lambda k: [5, 2, k])], [Shard(1, 2)], Shard(2, 1)),
    (ATEN.view.default, [_f(5, 24), Sized(lambda k: [5, k, 2])], [Shard(1, 2)], Unknown()),
    (ATEN.view.default, [_f(5, 12), Sized(lambda k: [5 * k])], [Shard(1)], Shard(0, 5)),
    (ATEN.cat.default, [[_f(5, 12), _f(5, 12)], 1], [Shard(1), Shard(1)], Shard(1, 2)),
    (ATEN.cat.default, [[_f(5, 12), _f(3, 12)]], [Shard(1), SAME], Unknown()),
    (ATEN.add.Tensor, [_f(5, 12), _f(5, 1)], [Shard(1), SAME], Shard(1)),
    (ATEN.add.Tensor, [_f(5), _f(5)], [PARTIAL_SUM, SAME], Unknown()),
    (ATEN.add.Tensor, [_f(5), _f(5)], [PARTIAL_SUM, ZERO], PARTIAL_SUM),
    (ATEN.add.Tensor, [_f(5), 1.0], [PARTIAL_SUM], Unknown()),
    (ATEN.masked_fill.Scalar, [_f(5), _f(5) > 0, -7.0], [PARTIAL_SUM, SAME], Unknown()),
    (ATEN.masked_fill.Scalar, [_f(5), _f(5) > 0, 0.0], [PARTIAL_SUM, SAME], PARTIAL_SUM),
    (ATEN.amax.default, [_f(5, 12), [1]], [Shard(1)], PARTIAL_MAX),
    (ATEN.mean.dim, [_f(5, 12), [1]], [Shard(1)], Unknown()),
    (ATEN.sum.dim_IntList, [_f(5, 12), [1]], [Shard(1)], PARTIAL_SUM),
    (ATEN.expand.default, [_f(5, 1), Sized(lambda k: [5, k])], [SAME], Shard(1, None)),
    (
        ATEN.scatter_add.default,
        [_f(12, 5), 0, torch.zeros(3, 5, dtype=torch.int64), _f(3, 5)],
        [Shard(0), SAME, SAME],
        Unknown(),
    ),
    (ATEN.rand_like.default, [_f(5)], [SAME], Unknown()),
    (ATEN.mul.Tensor, [_f(5, 12), Sized(lambda k: k)], [Shard(1)], Unknown()),
]


@pytest.mark.parametrize("number", range(len(CONCLUSIONS)))
def test_rules_in_isolation(number: int) -> None:
    overload, args, states, expected = CONCLUSIONS[number]
    (found,) = conclude_on(overload, args, {}, states, size=12)
    assert found == expected
