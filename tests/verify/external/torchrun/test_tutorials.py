"""Scripts of tutorials: they count GPUs, leave parameters without values and make rows by equal seeds."""

from __future__ import annotations

import pytest

from tests.verify.external.torchrun.running import told, verified
from verify.results.verdict import Verdict


def test_parameters_without_values_are_told_and_verified() -> None:
    report = verified("tutorial.py meta", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    (note,) = [note for note in report.notes if "to_empty" in note]
    assert "nothing initialises 2.weight, 2.bias:" in note


@pytest.mark.long
def test_own_rows_by_equal_seeds_are_no_copies_of_one_batch() -> None:
    """Every rank draws the same rows, and they are the rows of two ranks: the gradient is not doubled."""
    report = verified("tutorial.py rows", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any("by its seed alone" in note for note in report.notes), told(report)


def test_doubled_gradients_are_refuted() -> None:
    report = verified("tutorial.py doubled", 2)
    assert report.verdict is Verdict.REFUTED, told(report)
    assert report.findings[0].code == "gradient_differs"
    assert "2 times the model's" in str(report.findings[0].cause)


def test_a_script_that_ends_on_one_rank_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():  # what the script prints is read from its file descriptors
        report = verified("tutorial.py pairs", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    assert "ends before its first optimizer step: 'an even number of ranks, please'" in finding.message
    assert "model()" in str(finding.help)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "ranks"), [("rows", 4), ("meta", 4)])
def test_two_gpus_are_there_on_one_rank_too(kind: str, ranks: int) -> None:
    report = verified(f"tutorial.py {kind}", ranks, dtype="own")
    assert report.verdict is Verdict.TESTED_CALIBRATED, told(report)
