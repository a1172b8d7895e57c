"""The lattice of verdicts: the weakest counts, and nothing checked is not a pass."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from verify import Check, Finding, Report, Verdict, merge
from verify.results.finding_codes import CODES, explain

ORDER = [
    Verdict.PROVED_ALL_SIZES,
    Verdict.PROVED_BOUNDED,
    Verdict.TESTED_EXACT,
    Verdict.TESTED_CALIBRATED,
    Verdict.INCONCLUSIVE,
    Verdict.REFUTED,
]


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(ORDER, 2)))
def test_merge_takes_the_weaker(one: Verdict, other: Verdict) -> None:
    assert merge([one, other]) is other
    assert merge([other, one]) is other


def test_nothing_merges_to_inconclusive() -> None:
    assert merge([]) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("verdict", ORDER)
def test_exit_codes(verdict: Verdict) -> None:
    expected = {Verdict.INCONCLUSIVE: 3, Verdict.REFUTED: 1}.get(verdict, 0)
    assert verdict.exit_code == expected
    assert verdict.passes == (expected == 0)


def report(*checks: Check) -> Report:
    return Report("verify-plan", "model.py", "on 2 ranks (dp=2)", 0, checks)


def test_a_report_without_checks_is_inconclusive() -> None:
    assert report().exit_code == 3


def test_checks_that_counted_nothing_do_not_pass() -> None:
    assert report(Check("loss", Verdict.TESTED_EXACT, 0)).verdict is Verdict.INCONCLUSIVE


def test_an_open_check_that_counted_nothing_stays_open() -> None:
    passed = Check("loss", Verdict.TESTED_EXACT, 4)
    assert report(passed, Check("rest", Verdict.INCONCLUSIVE, 0)).exit_code == 3


def test_a_counter_example_outranks_an_open_check() -> None:
    assert report(Check("a", Verdict.INCONCLUSIVE, 0), Check("b", Verdict.REFUTED, 2, 1)).exit_code == 1


def test_counts_are_summed() -> None:
    both = report(Check("a", Verdict.TESTED_EXACT, 4), Check("b", Verdict.REFUTED, 3, 2))
    assert (both.total, both.refuted) == (7, 2)


def test_every_code_is_explained_in_a_sentence() -> None:
    for code in CODES:
        assert explain(code).endswith(".")
        assert code == code.lower()


def test_a_finding_keeps_its_own_reproduce_line() -> None:
    finding = Finding("loss_differs", "x")
    assert finding.with_reproduce("again").reproduce == "again"
    assert finding.with_reproduce("again").with_reproduce("other").reproduce == "again"
