"""Numbers that fill masked places are no scale of what stands beside them: an error of that size is no rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from verify.operators.report_on_operator import verify_spec

_DRAWS = torch.Generator().manual_seed(0)


def banned(scores: Tensor, fill: float) -> Tensor:
    """Fill the last column, as of a padded vocabulary."""
    return torch.cat([scores[:, :-1], torch.full_like(scores[:, -1:], fill)], 1)


def least_of_its_dtype(x: Tensor) -> Tensor:
    with torch.no_grad():
        return banned(x / (x.std(unbiased=False) + 1e-6), torch.finfo(x.dtype).min)


def least_of_float32(x: Tensor) -> Tensor:
    return banned(x - x.detach().logsumexp(-1).mean(), -1e30)


def billion(x: Tensor) -> Tensor:
    return banned(x + 1e-3 * x.detach().mean(), -1e9)


def positions_of_a_shard(x: Tensor) -> Tensor:
    assert not x.isnan().any()
    far = torch.arange(x.shape[0], dtype=x.dtype)[:, None] - torch.arange(x.shape[1], dtype=x.dtype)
    return (x - far.abs().log1p()).masked_fill(torch.arange(x.shape[1]) == 0, torch.finfo(x.dtype).min)


def a_large_gradient_beside(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] * 1e20, x[:, 1:] - x[:, 1:].logsumexp(0, keepdim=True)], 1)


def draws_of_its_own(x: Tensor) -> Tensor:
    return banned(x + torch.randn(x.shape, generator=_DRAWS, dtype=x.dtype), torch.finfo(x.dtype).min)


def recording_tells(x: Tensor) -> Tensor:
    return banned(x * 1 if torch.is_grad_enabled() else x + 5, torch.finfo(x.dtype).min)


WRONG = [
    least_of_its_dtype,
    least_of_float32,
    billion,
    positions_of_a_shard,
    a_large_gradient_beside,
    draws_of_its_own,
    recording_tells,
]


@pytest.mark.parametrize("operator", WRONG)
def test_an_error_beside_a_fill_is_refuted(operator: Callable[..., Any]) -> None:
    report = verify_spec(OperatorSpec(operator.__name__, "b v^ -> b v^", target=operator))
    assert report.exit_code == 1, report.to_json()


def centred_rows(x: Tensor) -> Tensor:
    return banned(x - x.mean(-1, keepdim=True), torch.finfo(x.dtype).min)


def added(x: Tensor) -> Tensor:
    """Rounds at the size of a fill, in the places that it fills."""
    return x + banned(torch.zeros_like(x), -1e9)


def causal(x: Tensor) -> Tensor:
    scores = x[:, :, None] * x[:, None, :]
    return scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, -1e30).logsumexp(-1)


def both_signs(x: Tensor) -> Tensor:
    return torch.cat([banned(x.cumsum(-1), 1e30), banned(-x, -1e12)], -1)


def large_results(x: Tensor) -> Tensor:
    """Numbers beyond every fill, of which each element is made."""
    rows = (20 * x).exp()
    return rows - rows.mean(-1, keepdim=True)


@pytest.mark.parametrize("operator", [centred_rows, added, causal, both_signs, large_results])
def test_right_operators_with_fills_pass(operator: Callable[..., Any]) -> None:
    report = verify_spec(OperatorSpec(operator.__name__, "b v^ -> b w^", target=operator))
    assert report.exit_code == 0, report.to_json()
