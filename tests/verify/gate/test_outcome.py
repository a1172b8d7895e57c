"""Known findings do not fail a gate; everything else that is wrong does."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from itertools import combinations

import pytest

from tests.verify.gate.results import LATER, TODAY, entry, finding, report, result
from verify.gate.accepted_findings_with_owners import fingerprints
from verify.gate.outcome import KNOWN, GateOutcome, ItemResult, judge, updated_entries, worst_code
from verify.programs.checks.input_and_outcome import outcome_of
from verify.results.finding_codes import UNFINISHED
from verify.results.report import Check
from verify.results.verdict import Verdict

PASS = result("b")


def judged(*results: object, entries: object = (), items: set[str] | None = None, today: date = TODAY) -> GateOutcome:
    names = items if items is not None else {r.name for r in results}  # type: ignore[attr-defined]
    return judge(list(results), tuple(entries), names, today, "baseline.toml")  # type: ignore[arg-type]


def test_a_new_finding_fails() -> None:
    outcome = judged(result("a", finding()), PASS)
    assert (outcome.exit_code, outcome.word) == (1, "REFUTED")
    assert [j.word for j in outcome.judged] == ["REFUTED", "VERIFIED"]


def test_a_known_finding_does_not_fail_and_is_shown() -> None:
    outcome = judged(result("a", finding()), PASS, entries=[entry()])
    assert (outcome.exit_code, outcome.word) == (0, "VERIFIED but for known findings")
    assert outcome.judged[0].word == "KNOWN"
    shown = outcome.judged[0].result.report.findings[0]
    assert shown.counter_example[KNOWN] == "until 2027-01-31, owner: ann@example.org (the fix is in review)"
    assert outcome.reports[0].verdict is Verdict.REFUTED, "what is known is still refuted"


@pytest.mark.parametrize(
    "narrow",
    [
        {"code": "loss_differs"},
        {"item": "b"},
        {"message": "another"},
        {"tensor": "other.weight"},
        {"fingerprint": "0" * 32},
        {"tensor": "layer.weight", "message": "another"},
    ],
)
def test_an_entry_about_something_else_does_not_cover(narrow: dict[str, str]) -> None:
    known = entry(**{"item": "a", **narrow})
    outcome = judged(result("a", finding()), PASS, entries=[known])
    assert outcome.judged[0].word == "REFUTED"
    assert outcome.baseline is not None and outcome.baseline.findings[0].code == "baseline_stale"


def test_a_second_finding_beside_a_known_one_fails() -> None:
    both = result("a", finding(), finding(tensor="other.weight"))
    outcome = judged(both, PASS, entries=[entry(tensor="layer.weight")])
    assert outcome.exit_code == 1
    assert [f.counter_example.get("tensor") for f in outcome.judged[0].new] == ["other.weight"]


def test_another_check_that_fails_beside_a_known_finding_is_new() -> None:
    """The findings of a check may be left out where another says the same: it must not be hidden."""
    wider = result("a", finding(), checks=("gradients", "evaluation"))
    assert judged(wider, PASS, entries=[entry(checks=("gradients", "evaluation"))]).exit_code == 0
    outcome = judged(wider, PASS, entries=[entry(checks=("gradients",))])
    assert outcome.exit_code == 1
    assert "fails more than when its findings became known: evaluation" in outcome.judged[0].new[0].message


def test_a_finding_that_is_not_shown_does_not_hide_behind_known_ones() -> None:
    """Of a check five findings are shown, the same ones when another tensor is wrong in the place of the last."""

    def found(*names: str) -> ItemResult:
        outcome = outcome_of(Check("gradients", Verdict.REFUTED, 9, len(names)), [finding(tensor=n) for n in names])
        right = result("a", *outcome.findings)
        return replace(right, report=replace(right.report, checks=(outcome.check,)))

    before = found(*"abcdef")
    entries, refused = updated_entries([before], [], {"a"}, TODAY, {"owner": "o", "expires": LATER, "reason": "r"})
    assert len(entries) == 5 and not refused
    for names, known in (("abcdef", True), ("abcdeg", False), ("abcdefg", False), ("abcde", False)):
        assert (judged(found(*names), PASS, entries=entries).exit_code == 0) == known, names
    by_hand = [entry(item="a", code="gradient_differs")]
    assert judged(found(*"abcde"), PASS, entries=by_hand).exit_code == 0
    assert "gradients" in judged(before, PASS, entries=by_hand).judged[0].new[0].message


def test_an_entry_holds_until_its_last_day_is_over() -> None:
    failing = result("a", finding())
    assert judged(failing, PASS, entries=[entry()], today=LATER).exit_code == 0
    outcome = judged(failing, PASS, entries=[entry()], today=LATER + timedelta(1))
    assert outcome.exit_code == 1
    assert outcome.judged[0].word == "REFUTED"
    assert outcome.baseline is not None
    assert "expired on 2027-01-31, owner: ann@example.org" in outcome.baseline.findings[0].message


def test_an_expired_entry_fails_also_where_nothing_is_found() -> None:
    outcome = judged(result("a"), entries=[entry(expires=TODAY - timedelta(1))])
    assert outcome.exit_code == 1
    assert outcome.baseline is not None and outcome.baseline.findings[0].code == "baseline_expired"


def test_an_entry_that_does_not_occur_any_more_fails() -> None:
    outcome = judged(result("a"), PASS, entries=[entry()])
    assert outcome.exit_code == 1
    assert outcome.baseline is not None
    assert "does not occur any more" in outcome.baseline.findings[0].message


def test_an_entry_of_an_item_that_is_gone_fails() -> None:
    assert judged(PASS, entries=[entry(item="gone")]).exit_code == 1


def test_an_entry_of_an_item_that_was_not_asked_for_stays() -> None:
    assert judged(PASS, entries=[entry()], items={"a", "b"}).exit_code == 0


@pytest.mark.parametrize("change", [{"finished": False}, {"stop": 2}])
def test_an_entry_of_an_item_that_did_not_run_to_its_end_is_not_stale(change: dict[str, int]) -> None:
    outcome = judged(replace(result("a", verdict=Verdict.INCONCLUSIVE), **change), PASS, entries=[entry()])  # type: ignore[arg-type]
    assert outcome.baseline is None


@pytest.mark.parametrize("code", sorted(UNFINISHED))
def test_what_was_not_decided_cannot_be_known(code: str) -> None:
    open_ = result("a", finding(code), verdict=Verdict.INCONCLUSIVE)
    assert judged(open_, PASS, entries=[entry(code=code)]).exit_code in (1, 3)
    assert judged(open_, PASS).exit_code == 3


@pytest.mark.parametrize("stop", [2, 101])
def test_an_item_that_could_not_run_is_never_known(stop: int) -> None:
    outcome = judged(result("a", finding(), stop=stop), PASS, entries=[entry()])
    assert outcome.exit_code == stop


def test_nothing_checked_is_no_pass() -> None:
    assert judged().exit_code == 3
    empty = replace(report(), checks=())
    assert judged(replace(PASS, report=empty)).exit_code == 3


def test_the_worst_exit_code_counts() -> None:
    order = (101, 2, 1, 3, 0)
    for first, second in combinations(order, 2):
        assert worst_code({first, second}) == first
    assert worst_code(set()) == 3


def test_updating_keeps_owners_and_forgets_what_is_gone() -> None:
    old = [entry(tensor="layer.weight"), entry("b", "loss_differs"), entry("gone"), entry("c", "loss_differs")]
    results = [result("a", finding()), result("b"), result("d", finding()), result("c", finished=False)]
    blame = {"owner": "bob", "expires": LATER, "reason": "new"}
    entries, refused = updated_entries(results, old, {"a", "b", "c", "d"}, TODAY, blame)
    assert [(e.item, e.owner) for e in entries] == [("a", "ann@example.org"), ("d", "bob"), ("c", "ann@example.org")]
    assert not refused
    assert judge(results, entries, {"a", "b", "c", "d"}, TODAY, "x").judged[-1].word == "VERIFIED"


def test_updating_refuses_what_was_not_decided() -> None:
    results = [result("a", finding("item_died"), verdict=Verdict.INCONCLUSIVE, finished=False)]
    entries, refused = updated_entries(results, [], {"a"}, TODAY, {})
    assert not entries
    assert [f.code for f in refused] == ["item_died"]


def test_a_fingerprint_does_not_depend_on_the_line_number() -> None:
    ((_, one),) = fingerprints(report(finding(line=3)))
    ((_, other),) = fingerprints(report(finding(line=30)))
    assert one == other
