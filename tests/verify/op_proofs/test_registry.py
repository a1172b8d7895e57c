"""Proofs of the built-in operators: nearly all are proved, and the others say why not."""

from __future__ import annotations

from functools import cache

import pytest

from op_registry.builtin import elementwise, linear_algebra_fourier_complex
from op_registry.registry import default_registry
from op_registry.samples import SAMPLES

from tests.verify.op_proofs.survey import SurveyRow, survey

# Operators of which something is not proved, by a part of the reason.
_UNPROVED = {
    "a number that was read from a shard": """
        index_put.default masked_select.default
    """,
    "by the rank's place": """
        arange.default arange.start arange.start_step avg_pool1d.default avg_pool2d.default avg_pool3d.default
        conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv_transpose1d.default
        conv_transpose2d.input conv_transpose3d.input embedding.default gather.default index.Tensor
        index_add.default index_copy.default index_fill.int_Scalar index_fill.int_Tensor index_reduce.default
        index_select.default masked_scatter.default max_pool1d.default max_pool2d.default max_pool3d.default
        scaled_dot_product_attention.default scatter.reduce scatter.src scatter.value scatter.value_reduce
        scatter_add.default scatter_reduce.two nnscaler.ce_pick nnscaler.embedding_bag
    """,
    "depends on the size that is split": """
        _upsample_nearest_exact1d.default _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec
        _upsample_nearest_exact3d.default adaptive_avg_pool2d.default col2im.default instance_norm.default
        upsample_nearest1d.default upsample_nearest2d.default upsample_nearest2d.vec upsample_nearest3d.default
        nnscaler.pick nnscaler.random_normal nnscaler.random_uniform
    """,
    "draws random numbers": """
        rrelu.default
    """,
    "has no rule": """
        _native_batch_norm_legit_no_training.default _neg_view.default _upsample_bicubic2d_aa.vec
        _upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.vec aminmax.default channel_shuffle.default
        diag_embed.default empty_like.default fft_fft.default fft_fft2.default fft_fftn.default fft_ifft.default
        fft_ifft2.default fft_ifftn.default grid_sampler.default histc.default isin.Tensor_Scalar isin.Tensor_Tensor
        max_unpool2d.default max_unpool3d.default nanquantile.default norm.ScalarOpt_dtype nuclear_norm.dim
        quantile.default renorm.default rnn_relu.input rnn_tanh.input rot90.default
        searchsorted.Scalar searchsorted.Tensor take.default
    """,
    "is read whole": """
        bucketize.Tensor im2col.default linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim unfold.default
    """,
    "it depends on whether": """
        nnscaler.grouped_mm
    """,
    "it runs only where": """
        adaptive_avg_pool1d.default chain_matmul.default complex.default kron.default linalg_matrix_norm.default
        linalg_multi_dot.default norm_except_dim.default sgn.default take_along_dim.default
    """,
    "its call is rewritten for shards": """
        ctc_loss.Tensor new_empty_strided.default
    """,
    "its call is rewritten for shards (": """
        rnn_relu_cell.default rnn_tanh_cell.default
    """,
    "its call is rewritten for shards (nnscaler.batch_mean)": """
        nnscaler.batch_mean
    """,
    "its call is rewritten for shards (nnscaler.batch_variance)": """
        nnscaler.batch_variance
    """,
    "its hook refuses": """
        chunk.default conv3d.padding
    """,
    "its trace raises": """
        __lshift__.Tensor __rshift__.Tensor addbmm.default bilinear.default multi_margin_loss.default
        multilabel_margin_loss.default trace.default
    """,
    "its trace raises RuntimeError": """
        _upsample_bicubic2d_aa.default affine_grid_generator.default fft_irfft2.default fft_irfftn.default
        istft.default
    """,
    "not an ATen operator": """
        transformers.grouped_mm_fallback.default
    """,
    "not linear in": """
        binary_cross_entropy.default binary_cross_entropy_with_logits.default kl_div.default ldexp.Tensor
    """,
    "size that is split": """
        _upsample_nearest_exact3d.vec adaptive_avg_pool3d.default empty.memory_format new_empty.default
        upsample_nearest3d.vec
    """,
    "sizes [": """
        _upsample_nearest_exact1d.vec upsample_nearest1d.vec
    """,
    "the sum of weights is not written": """
        nll_loss2d_forward.default nll_loss_forward.default
    """,
    "writes to a tensor that has views": """
        fft_hfft.default fft_hfft2.default fft_hfftn.default fft_ihfft.default fft_ihfft2.default fft_ihfftn.default
        fft_irfft.default fft_rfft.default fft_rfft2.default fft_rfftn.default gru.input gru_cell.default lstm.input
        lstm_cell.default pad.default stft.center stft.default
    """,
}


def _named(name: str) -> str:
    return name if name.startswith(("nnscaler.", "transformers.")) else f"aten.{name}"


UNPROVED = {_named(name): reason for reason, names in _UNPROVED.items() for name in names.split()}

# Operators whose kernels have no rules: they are verified by tests alone.
TESTED = frozenset(
    {spec.name for spec in linear_algebra_fourier_complex.SPECS}
    | {spec.name for spec in elementwise.SPECS if spec.name.startswith("aten.special_")}
    | {"aten.diag.default", "aten.linalg_diagonal.default", "aten.diagflat.default"}
)


ALWAYS = ("aten.linear.default", "aten.scaled_dot_product_attention.default", "aten.matmul.default")
SLOW = ("aten.grid_sampler.default", "nnscaler.grouped_mm", "aten.conv3d.default")


@cache
def _rows(full: bool) -> tuple[SurveyRow, ...]:
    """A ninth of the operators, or all of them."""
    registry = default_registry()
    names = list(dict.fromkeys(sample.operator for sample in SAMPLES if sample.operator not in TESTED))
    chosen = names if full else [n for i, n in enumerate(names) if n in ALWAYS or (i % 9 == 0 and n not in SLOW)]
    return survey(spec for spec in map(registry.lookup, chosen) if spec is not None)


ALL = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)], ids=["a ninth", "all"])


@pytest.mark.early
@ALL
def test_most_is_proved(full: bool) -> None:
    """Every claim about three of four operators, and four of five claims: a block that has to know its place, and what
    has no rule, are tested only."""
    rows = _rows(full)
    assert sum(row.complete for row in rows) >= 0.75 * len(rows)
    assert sum(row.proved for row in rows) >= 0.8 * sum(row.targets for row in rows)
    assert sum(row.targets for row in rows) > (3000 if full else 400)


@pytest.mark.early
@ALL
def test_the_others_are_known_and_say_why(full: bool) -> None:
    incomplete = {row.operator: row.blockers for row in _rows(full) if not row.complete}
    assert set(incomplete) == set(UNPROVED) & {row.operator for row in _rows(full)}
    assert not full or set(incomplete) == set(UNPROVED)
    for name, blockers in incomplete.items():
        assert any(UNPROVED[name] in blocker for blocker in blockers), (name, blockers)


@pytest.mark.early
@pytest.mark.parametrize("name", ["aten.linear.default", "aten.scaled_dot_product_attention.default"])
def test_a_row_counts_what_there_is_to_prove(name: str) -> None:
    (row,) = (row for row in _rows(False) if row.operator == name)
    unproved = row.blockers.get("its call is rewritten for shards, by the rank's place", 0)
    assert row.proved == row.targets - unproved > 5
    assert unproved == (4 if name.startswith("aten.scaled") else 0)  # blocks of rows of causal calls
