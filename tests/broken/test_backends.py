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
