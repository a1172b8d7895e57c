"""True annotations are not refuted for what is no matter of shards: rounding, overflow, sizes the operator refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from op_registry.spec import OperatorSpec

from tests.sampling import every
from tests.verify.op_checks.test_beyond_bounds import verified
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec
from verify.results.verdict import Verdict

SEEDS = pytest.mark.parametrize("seed", every(3, [0, 1, 4]))


def over_rows(x: Tensor) -> Tensor:
    share = 1.0 / x.shape[0]  # rounded, otherwise in a shard than in the whole
    return (x * share).sum(0) * x.shape[0]


def scaled_and_back(x: Tensor, w: Tensor) -> Tensor:
    return (x * x.shape[-1] ** -0.5) @ w.t() * x.shape[-1] ** 0.5


@SEEDS
@pytest.mark.parametrize(("function", "annotation"), [(over_rows, "n+ d -> d"), (scaled_and_back, "n k+, m k+ -> n m")])
def test_a_proof_knows_that_floats_of_the_code_are_rounded(function: Any, annotation: str, seed: int) -> None:
    assert verified(function, annotation, seed).verdict.passes


def wrong_by_a_little(x: Tensor) -> Tensor:
    return x.sum(0) * (1 + 1e-6 * x.shape[0])


def wrong_for_one_id(x: Tensor, ids: Tensor) -> Tensor:
    taken = ids != torch.iinfo(torch.int64).max
    return x * taken[:, None] * (taken.numel() / taken.sum().clamp(min=1))


@pytest.mark.parametrize(
    ("function", "annotation"), [(wrong_by_a_little, "n+ d -> d"), (wrong_for_one_id, "n d, n -> n d")]
)
def test_a_difference_beyond_rounding_is_one(function: Any, annotation: str) -> None:
    assert verified(function, annotation).verdict is Verdict.REFUTED


def with_zeros_of_the_default_dtype(x: Tensor) -> Tensor:
    start = torch.zeros(1, x.shape[1]) @ x.float().t()
    return start.t().to(x.dtype) + x[:, :1]


def test_one_that_raises_under_another_default_dtype_is_not_refuted_for_it() -> None:
    report = verified(with_zeros_of_the_default_dtype, "n d^ -> n 1")
    assert report.verdict.passes
    assert any("raises when torch's default dtype is float64" in note for note in report.notes)


def group_normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 1, w, b))  # which raises where there is one value in all


def of_one_row_alone(x: Tensor) -> Tensor:
    """Wrong for every number of rows, and one that raises for one row besides."""
    if x.shape[0] == 1:
        raise ValueError("one row")
    return x - x.mean(0)


def of_no_less_than(x: Tensor) -> Tensor:
    if x.shape[0] < 8:
        raise ValueError("too few rows")
    return x * 2


@SEEDS
def test_a_shard_of_one_element_on_which_the_whole_raises_too_is_left_out(seed: int) -> None:
    report = verified(group_normed, "b c^ s^, c^, c^ -> b c^ s^", seed)
    assert report.verdict.passes
    assert "`planted` raises on one element of `b`: not so small shards passed" in report.notes


@pytest.mark.parametrize("function", [of_one_row_alone, of_no_less_than])
def test_one_that_is_wrong_or_raises_on_larger_shards_is_refuted(function: Any) -> None:
    assert verified(function, "n d -> n d").verdict is Verdict.REFUTED


def delta_rule(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A state that grows by each step in float32, and overflows after many."""
    dtype, (b, length, d) = q.dtype, q.shape
    q, k, v = (x.float() for x in (q, k, v))
    state, rows = q.new_zeros(b, d, v.shape[-1]), []
    for i in range(length):
        step = v[:, i] - (state * k[:, i, :, None]).sum(-2)
        state = state + k[:, i, :, None] * step[:, None]
        rows.append(torch.einsum("bd,bdm->bm", q[:, i], state))
    return torch.stack(rows, 1).to(dtype)


def delta_rule_in_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    return delta_rule(q, k, v)


def delta_rule_that_mixes_if_long(q: Tensor, k: Tensor, v: Tensor, least: int = 40) -> Tensor:
    y = delta_rule(q, k, v)
    return y - y.mean(0) if q.shape[1] > least else y


@pytest.mark.parametrize("function", [delta_rule, pytest.param(delta_rule_in_chunks, marks=pytest.mark.long)])
def test_where_shards_overflow_after_many_steps_is_no_difference(function: Any) -> None:
    assert verified(function, "b l^ k^, b l^ k^, b l^ v -> b l^ v").verdict.passes


@pytest.mark.long
def test_smaller_values_show_what_is_wrong_after_many_steps() -> None:
    report = verified(delta_rule_that_mixes_if_long, "b l^ k^, b l^ k^, b l^ v -> b l^ v")
    assert report.verdict is Verdict.REFUTED


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of a dim: the angles have half of its size."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


@pytest.mark.long
def test_sizes_that_depend_on_each_other_are_not_changed_alone() -> None:
    def samples() -> tuple[Tensor, ...]:
        return torch.randn(6, 8), torch.randn(6, 4), torch.randn(6, 4)

    spec = OperatorSpec("rotated", "t d^, t e^, t e^ -> t d^", target=rotated, sample_inputs=samples)
    report = verify_spec(spec, OpOptions())
    assert report.verdict is Verdict.PROVED_BOUNDED
    assert any("at sizes of our choice" in note for note in report.notes)
