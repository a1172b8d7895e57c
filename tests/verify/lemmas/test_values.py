"""A user's operator that does something else on some values is looked at there in lemmas too."""

from __future__ import annotations

import pytest

from nnscaler.ir.operation_placement import Split
from tests.verify.lemmas.planted import called, floats, proved, stated, users
from tests.verify.value_branches import RIGHT, WRONG, Operator, never_on_the_other_side, where_few_are_large
from verify.programs.lemmas import LemmaResult
from verify.results.verdict import Verdict


def looked_at(function: Operator) -> LemmaResult:
    spec = users(function, "a b -> a b")
    return proved(stated(spec, called("planted", [(64, 10)], floats(64, 10)), Split("a"), axes=(("dp", 2),)))


@pytest.mark.parametrize("function", [f for f in WRONG if f is not where_few_are_large])
def test_what_is_wrong_on_some_values_is_refuted(function: Operator) -> None:
    result = looked_at(function)
    assert result.verdict is Verdict.REFUTED
    assert {o.code for outcome in result.outcomes for o in outcome.findings} == {"annotation_wrong"}


@pytest.mark.parametrize("function", RIGHT)
def test_what_is_right_on_all_values_passes(function: Operator) -> None:
    assert looked_at(function).verdict.passes


def test_a_side_that_no_value_reaches_is_unknown() -> None:
    assert looked_at(never_on_the_other_side).verdict is Verdict.INCONCLUSIVE
