"""True annotations are not refuted for what is no matter of shards: rounding, overflow, sizes the operator refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify.op_checks.test_beyond_bounds import verified
from verify.results.verdict import Verdict

SEEDS = pytest.mark.parametrize("seed", [0, 1, 4])


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
