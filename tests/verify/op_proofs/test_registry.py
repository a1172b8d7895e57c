"""What is proved of the built-in operators: nearly all, and the others say why."""

from __future__ import annotations

from functools import cache

import pytest

from op_registry.builtin import diagonal, distance, linear_algebra, special
from op_registry.registry import default_registry
from op_registry.samples import SAMPLES

from verify.op_proofs.survey import Row, survey

# Operators of which something is not proved, with a part of the reason.
UNPROVED = {
    "aten.__lshift__.Tensor": "its trace raises",
    "aten.__rshift__.Tensor": "its trace raises",
    "aten._native_batch_norm_legit_no_training.default": "has no rule",
    "aten.addbmm.default": "its trace raises",
    "aten.aminmax.default": "has no rule",
    "aten.arange.default": "by the rank's place",
    "aten.arange.start": "by the rank's place",
    "aten.arange.start_step": "by the rank's place",
    "aten.bilinear.default": "its trace raises",
    "aten.binary_cross_entropy.default": "not linear in",
    "aten.binary_cross_entropy_with_logits.default": "not linear in",
    "aten.bucketize.Tensor": "is read whole",
    "aten.chain_matmul.default": "it runs only where",
    "aten.chunk.default": "one number of parts does not tell how",
    "aten.ctc_loss.Tensor": "its call is rewritten for shards",
    "aten.embedding.default": "by the rank's place",
    "aten.empty.memory_format": "size that is split",
    "aten.empty_like.default": "has no rule",
    "aten.histc.default": "has no rule",
    "aten.index_put.default": "a number that was read from a shard",
    "aten.instance_norm.default": "depends on the size that is split",
    "aten.isin.Tensor_Scalar": "has no rule",
    "aten.isin.Tensor_Tensor": "has no rule",
    "aten.kl_div.default": "not linear in",
    "aten.kron.default": "it runs only where",
    "aten.ldexp.Tensor": "not linear in",
    "aten.linalg_matrix_norm.default": "it runs only where",
    "aten.linalg_multi_dot.default": "it runs only where",
    "aten.linalg_vector_norm.default": "is read whole",
    "aten.multi_margin_loss.default": "its trace raises",
    "aten.multilabel_margin_loss.default": "its trace raises",
    "aten.nanquantile.default": "has no rule",
    "aten.new_empty.default": "size that is split",
    "aten.new_empty_strided.default": "its call is rewritten for shards",
    "aten.nll_loss2d_forward.default": "the sum of weights is not written",
    "aten.nll_loss_forward.default": "the sum of weights is not written",
    "aten.norm.Scalar": "is read whole",
    "aten.norm.ScalarOpt_dim": "is read whole",
    "aten.norm.ScalarOpt_dtype": "has no rule",
    "aten.norm_except_dim.default": "it runs only where",
    "aten.nuclear_norm.dim": "has no rule",
    "aten.pad.default": "writes to a tensor that has views",
    "aten.prelu.default": "has no rule",
    "aten.quantile.default": "has no rule",
    "aten.renorm.default": "has no rule",
    "aten.rrelu.default": "draws random numbers",
    "aten.searchsorted.Scalar": "has no rule",
    "aten.searchsorted.Tensor": "has no rule",
    "aten.sgn.default": "it runs only where",
    "aten.trace.default": "its trace raises",
    "nnscaler.ce_pick": "by the rank's place",
    "nnscaler.grouped_mm": "it depends on whether",
    "nnscaler.random_normal": "depends on the size that is split",
    "nnscaler.random_uniform": "depends on the size that is split",
    "transformers.grouped_mm_fallback.default": "not an ATen operator",
}


# Families whose kernels have no rules: they are verified by tests alone.
TESTED = frozenset(spec.name for family in (diagonal, distance, linear_algebra, special) for spec in family.SPECS)


@cache
def _rows() -> tuple[Row, ...]:
    registry = default_registry()
    names = dict.fromkeys(sample.operator for sample in SAMPLES if sample.operator not in TESTED)
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
