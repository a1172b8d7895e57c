"""Scripts whose data parts count as many labels by chance, which hides a mean of the parts' means."""

from __future__ import annotations

import pytest

from tests.verify.external.torchrun.running import told, verified
from verify.external.unequal_label_counts import NAME
from verify.results.verdict import Verdict

_NOTE = "every data part counts as many labels in these batches"


@pytest.mark.parametrize(
    "command",
    [
        "padded.py own",
        pytest.param("padded.py own --inverse", marks=pytest.mark.long),
        pytest.param("padded.py mean --drawn", marks=pytest.mark.long),
        pytest.param("padded.py mean --pad 0", marks=pytest.mark.long),
    ],
)
def test_a_mean_of_means_is_left_open(command: str) -> None:
    report = verified(command, 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert [check.name for check in report.checks if not check.verdict.passes] == [NAME], told(report)
    (finding,) = report.findings
    assert finding.message.startswith("with unequal numbers of labels in the data parts, the ranks agree with the mean")
    assert "--reference parts" in str(finding.help)
    assert verified(command, 2, reference="parts").verdict.passes


@pytest.mark.parametrize(
    "command",
    ["padded.py ranks --inverse", pytest.param("padded.py ranks --pad 0", marks=pytest.mark.long)],
)
def test_labels_of_all_ranks_are_right(command: str) -> None:
    report = verified(command, 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert next(check for check in report.checks if check.name == NAME).count > 0, told(report)
    assert not any(note.startswith(_NOTE) for note in report.notes), told(report)


@pytest.mark.long
def test_what_other_numbers_of_labels_do_not_show_is_told() -> None:
    """The script counts its labels before they come in where they can be made others."""
    report = verified("padded.py own --drawn", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any(note.startswith(_NOTE) for note in report.notes), told(report)
