"""Which identifiers may be split, and where a split lies."""

from __future__ import annotations

import pytest

from op_registry import Shard, bind, shard_of, splittable

MATMUL = bind("m k+, k+ n -> m n", [(4, 6), (6, 8)])
HEADS = bind("b (h d) -> b h d", [(2, 24)], None, {"h": 6})
PACKED = bind("t [q k v] -> t q, t k, t v", [(4, 12)], [(4, 6), (4, 2), (4, 4)])


@pytest.mark.parametrize(
    ("bound", "identifier", "parts", "outer", "reason"),
    [
        (MATMUL, "m", 2, 1, None),
        (MATMUL, "k", 3, 2, None),
        (MATMUL, "k", 4, 1, "`k` has size 6, which does not divide by 4"),
        (MATMUL, "k", 2, 2, "`k` has size 6, which does not divide by 2 x 2"),
        (MATMUL, "x", 2, 1, "`x` is no identifier of `m k+, k+ n -> m n`; those are `m`, `k`, `n`"),
        (bind("m k^ -> m", [(4, 6)]), "k", 2, 1, "`k` is frozen (`^`) in `m k^ -> m`"),
        (HEADS, "d", 2, 1, None),
        (PACKED, "k", 2, 1, None),
        (PACKED, "q", 3, 1, "`k` has size 2, which does not divide by 3"),
        (PACKED, "q", 2, 3, "`q` is a part of a concatenation, which only splits into contiguous blocks"),
        (bind("a -> a, ?", [(4,)]), "a", 2, 1, None),
        (bind("-> ()", []), "a", 2, 1, "`a` is no identifier of `-> ()`"),
    ],
)
def test_splittable(bound: object, identifier: str, parts: int, outer: int, reason: str | None) -> None:
    assert splittable(bound, identifier, parts, outer) == reason  # type: ignore[arg-type]


def test_shard_of() -> None:
    x, w = MATMUL.inputs
    assert x is not None and w is not None
    assert shard_of(MATMUL, x, "k") == Shard(1) and shard_of(MATMUL, w, "k", 2) == Shard(0, 2)
    assert shard_of(MATMUL, w, "m") is None
    packed = HEADS.inputs[0]
    assert packed is not None
    assert shard_of(HEADS, packed, "h") == Shard(1) and shard_of(HEADS, packed, "d", 2) == Shard(1, 12)
    whole, q = PACKED.inputs[0], PACKED.outputs[0]
    assert whole is not None and q is not None
    assert shard_of(PACKED, whole, "v") == Shard(1, 1, (6, 2, 4)) and shard_of(PACKED, q, "v") == Shard(1)


@pytest.mark.parametrize(
    ("bound", "identifier", "sections", "reason"),
    [
        (MATMUL, "k", (2, 4), None),
        (MATMUL, "k", (3, 3), "sections (3, 3) do not divide by 2"),
        (MATMUL, "k", (2, 2), "sections (2, 2) do not divide by 2"),
        (HEADS, "h", (2, 4), "'h' is not a whole dim"),
        (HEADS, "d", (2, 2), "'d' is not a whole dim"),
        (PACKED, "q", (2, 4), "'q' is not a whole dim"),
        (bind("m k^ -> m", [(4, 6)]), "k", (2, 4), "`k` is frozen (`^`) in `m k^ -> m`"),
    ],
)
def test_sections_are_of_whole_dims(bound: object, identifier: str, sections: tuple[int, ...], reason: str) -> None:
    assert splittable(bound, identifier, 2, sections=sections) == reason  # type: ignore[arg-type]


def test_sections_of_a_factor_have_no_shard() -> None:
    packed, heads = HEADS.inputs[0], HEADS.outputs[0]
    assert packed is not None and heads is not None
    assert shard_of(HEADS, heads, "h", sections=(2, 4)) == Shard(1, 1, (2, 4))
    with pytest.raises(ValueError, match="no shard of"):
        shard_of(HEADS, packed, "h", sections=(2, 4))
