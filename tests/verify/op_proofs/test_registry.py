"""What is proved of the built-in operators: nearly all, and the others say why."""

from __future__ import annotations

from functools import cache

import pytest

from op_registry.registry import default_registry
from op_registry.samples import SAMPLES

from verify.op_proofs.survey import Row, survey

# Operators of which something is not proved, with a part of the reason.
UNPROVED = {
    "aten.arange.default": "by the rank's place",
    "aten.arange.start": "by the rank's place",
    "aten.arange.start_step": "by the rank's place",
    "aten.chunk.default": "one number of parts does not tell how",
    "aten.embedding.default": "by the rank's place",
    "aten.empty.memory_format": "size that is split",
    "aten.empty_like.default": "has no rule",
    "aten.index_put.default": "a number that was read from a shard",
    "aten.new_empty.default": "size that is split",
    "aten.pad.default": "writes to a tensor that has views",
    "aten.sgn.default": "it runs only where",
    "nnscaler.ce_pick": "by the rank's place",
    "nnscaler.grouped_mm": "it depends on whether",
    "nnscaler.random_normal": "depends on the size that is split",
    "nnscaler.random_uniform": "depends on the size that is split",
    "transformers.grouped_mm_fallback.default": "not an ATen operator",
}


@cache
def _rows() -> tuple[Row, ...]:
    registry = default_registry()
    names = dict.fromkeys(sample.operator for sample in SAMPLES)
    return survey(spec for spec in map(registry.lookup, names) if spec is not None)


def test_nearly_all_operators_are_proved() -> None:
    complete = sum(row.complete for row in _rows())
    assert complete >= 0.9 * len(_rows())
    assert sum(row.targets for row in _rows()) > 1500


def test_the_others_are_known_and_say_why() -> None:
    incomplete = {row.operator: row.blockers for row in _rows() if not row.complete}
    assert set(incomplete) == set(UNPROVED)
    for name, reason in UNPROVED.items():
        assert any(reason in blocker for blocker in incomplete[name]), (name, incomplete[name])


def test_it_is_fast() -> None:
    assert sum(row.seconds for row in _rows()) < 90.0


@pytest.mark.parametrize("name", ["aten.linear.default", "aten.scaled_dot_product_attention.default"])
def test_a_row_counts_what_there_is_to_prove(name: str) -> None:
    (row,) = (row for row in _rows() if row.operator == name)
    assert row.complete
    assert row.proved == row.targets > 5
