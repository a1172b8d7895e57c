"""An operator that does something else on some values is looked at there, wherever they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.verify.op_checks.test_beyond_bounds import verified
from tests.verify.value_branches import RIGHT, WRONG, Operator, in_a_narrow_window, never_on_the_other_side, rows_alone
from verify.results.verdict import Verdict


@pytest.mark.parametrize("function", WRONG)
@pytest.mark.parametrize("annotation", ["b d -> b d", pytest.param("b d^ -> b d^", marks=pytest.mark.long)])
def test_what_is_wrong_on_some_values_is_refuted(function: Operator, annotation: str) -> None:
    report = verified(function, annotation)
    assert report.verdict is Verdict.REFUTED
    codes = {finding.code for finding in report.findings}
    assert codes - {"gradient_is_not_derivative"} == {"annotation_wrong"}  # one that clips is not linear either


@pytest.mark.parametrize(
    ("function", "annotation"), [*((function, "b d -> b d") for function in RIGHT), (rows_alone, "b d^ -> b d^")]
)
def test_what_is_right_on_all_values_passes(function: Operator, annotation: str) -> None:
    assert verified(function, annotation).verdict.passes


def test_inputs_that_are_equal_on_one_shard() -> None:
    def unless_equal(x: Tensor, y: Tensor) -> Tensor:
        return x * 0 if torch.equal(x, y) else x * y

    report = verified(unless_equal, "b d, b d -> b d")
    assert {f.counter_example["values"] for f in report.findings if f.code == "annotation_wrong"} == {"mostly"}


@pytest.mark.parametrize("function", [never_on_the_other_side, in_a_narrow_window])
def test_a_side_that_no_value_reaches_leaves_the_check_open(function: Operator) -> None:
    report = verified(function)
    assert report.verdict is Verdict.INCONCLUSIVE
    (finding,) = report.findings
    assert finding.code == "claim_not_tested" and "value_branches.py" in finding.message
