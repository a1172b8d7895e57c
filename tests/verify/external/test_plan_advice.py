"""Advice on plans of transformers: a rule that is taken away is named, tried, and proposed."""

from __future__ import annotations

from typing import Any

import pytest

from verify.external.request import ExternalRequest
from verify.external.transformers import expand_requests
from verify.external.transformers.check_parallel_degrees import PlanChanges
from verify.external.transformers.lint_and_repair_plan import verify_plan_of_library

RULE, RIGHT, WRONG = "model.layers.*.self_attn.q_norm", "replicated_with_grad_allreduce", "replicate"
REQUEST = ExternalRequest("hf:qwen3", tp=(2,), steps=1, level="run")


@pytest.fixture
def wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the norm of queries leaves its gradient as each rank has it."""

    def program_of(request: ExternalRequest, changes: PlanChanges | None = None) -> Any:
        return expand_requests.program_of(request, changes or PlanChanges(tp={RULE: WRONG}))

    def model_of(request: ExternalRequest) -> Any:
        built, sizes = expand_requests.model_of(request)
        built.model._tp_plan[RULE] = WRONG  # type: ignore[index, operator]
        return built, sizes

    monkeypatch.setattr("verify.external.transformers.lint_and_repair_plan.program_of", program_of)
    monkeypatch.setattr("verify.external.transformers.lint_and_repair_plan.model_of", model_of)


def test_a_rule_that_mends_the_plan_is_proposed(wrong_plan: None) -> None:
    said: list[str] = []
    report = verify_plan_of_library(REQUEST, said.append)
    assert report.verdict.word == "REFUTED"
    (finding,) = [f for f in report.findings if f.code == "gradient_differs"]
    assert "q_norm.weight" in finding.message and "all_reduce over tp is missing" in str(finding.cause)
    assert finding.help == f'in the tp plan: "{RULE}": "{RIGHT}" (tried: with it every check passes)'
    assert said[-1].startswith("trying in the tp plan")


@pytest.mark.long
def test_a_rule_that_does_not_mend_it_is_not_proposed(wrong_plan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.transformers.lint_and_repair_plan.SUMMED", "colwise")
    monkeypatch.setattr("verify.external.transformers.lint_and_repair_plan.MOST_REPAIRS", 1)
    report = verify_plan_of_library(REQUEST, lambda text: None)
    (finding,) = [f for f in report.findings if f.code == "gradient_differs"]
    assert "in the tp plan" not in str(finding.help)


@pytest.mark.long
def test_a_right_plan_has_no_advice() -> None:
    report = verify_plan_of_library(REQUEST, lambda text: None)
    assert report.verdict.passes and not report.findings
    assert not [note for note in report.notes if note.startswith("the plan")]


@pytest.mark.long
def test_what_reads_oddly_is_a_note() -> None:
    """One head of keys on two ranks: the library raises, and the note says why."""
    request = ExternalRequest("hf:llama", tp=(2,), steps=1, level="run", settings=("num_key_value_heads=1",))
    report = verify_plan_of_library(request, lambda text: None)
    assert [finding.code for finding in report.findings] == ["rank_raises"]
    assert any("num_key_value_heads = 1 does not divide by 2 ranks" in note for note in report.notes)
