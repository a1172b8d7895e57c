"""The loss that a rank reports: of its own rows, of all, or its share of a mean or of a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from tests.verify.external import programs
from tests.verify.external.programs import program
from verify.external.program import default_step
from verify.external.verify import verify_program
from verify.results.verdict import Verdict


def share(model: nn.Module, batch: Any) -> Tensor:
    """Return half of the loss: of two ranks, each divides by the terms of both."""
    return default_step(model, batch) / 2


def halved_at_the_end(model: nn.Module, batch: Any) -> Tensor:
    """Run the backward pass of the whole loss, and report half of it."""
    loss = default_step(model, batch)
    loss.backward()
    return loss.detach() / 2


def test_shares_of_a_sum_are_right_where_gradients_are() -> None:
    report = verify_program(replace(program(programs.summed, dp=2), step=share, reference_step=default_step))
    assert report.verdict is Verdict.TESTED_EXACT, [f.message for f in report.findings]


@pytest.mark.long
def test_shares_whose_gradients_are_averaged_are_wrong() -> None:
    report = verify_program(replace(program(programs.replicated, dp=2), step=share, reference_step=default_step))
    assert report.verdict is Verdict.REFUTED
    assert "gradient_differs" in {finding.code for finding in report.findings}


@pytest.mark.long
def test_shares_on_an_axis_without_data_are_wrong() -> None:
    wrong = replace(program(programs.tensor_parallel, tp=2), step=halved_at_the_end, reference_step=default_step)
    report = verify_program(wrong)
    assert report.verdict is Verdict.REFUTED
    assert {finding.code for finding in report.findings} == {"loss_differs"}
