"""Wrong values are found with every backend and precision, and from the command line, as on threads in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main
from tests.broken.planting import Edit, Original, assert_refuted

MISSING = Edit("comm.all_reduce(linear_1, self.tp)", "linear_1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_low_precision(small_sharded: Original, tmp_path: Path, dtype: str) -> None:
    report = small_sharded.verify(small_sharded.broken(tmp_path, [MISSING]), dtype=dtype)
    assert_refuted(report, "tensor_differs", "linear_1_v1")


def test_from_the_command_line_on_processes(
    small_sharded: Original, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = small_sharded.broken(tmp_path, [MISSING])
    model = str(repository / "tests/broken/models.py")
    assert main(["verify-plan", model, "--program", str(program), "--backend", "gloo"]) == 1
    written = capsys.readouterr().out
    assert "`linear_1_v1`" in written and "an all_reduce over tp is missing" in written
    assert written.splitlines()[-1].startswith("REFUTED")


def test_what_contradicts_itself_is_told_by_its_ranks(staged: Original, tmp_path: Path) -> None:
    """Two ranks send, and one receives. Who communicates is found before ranks start, which must not be the end."""
    fewer = Edit("peers=(0, 1)", "peers=(0,)", role=1)
    report = staged.verify(staged.broken(tmp_path, [fewer]), backend="gloo", depth="quick")
    assert report.exit_code == 1, report.to_json()
    assert report.findings[0].code == "rank_raises" and "rank 3, F1.0" in report.findings[0].message
