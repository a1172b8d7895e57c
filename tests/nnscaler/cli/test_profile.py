"""`nnscaler profile`: a real measurement of a tiny model between two processes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.model_file import TEMPLATE
from nnscaler.planning.cost.measured_profile import load_profile
from nnscaler.planning.cost.model_protocol import AxisPlace
from nnscaler.planning.cost.profile_cost import TableCost


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps are timed for a moment only."""
    monkeypatch.setattr("nnscaler.performance.measure_step_overheads._SECONDS", 0.01)


def test_a_profile_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(TEMPLATE, encoding="utf-8")
    out = tmp_path / "new" / "p.json"
    assert main(["profile", str(tmp_path / "model.py"), "--ranks", "2", "--seconds", "2", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "calibration error of operators (|predicted / measured - 1| of " in said.out
    assert "calibration error of collectives (|predicted / measured - 1| of 20)" in said.out
    assert f"wrote {out}" in said.out and "trace" in said.err and "collectives" in said.err
    profile = load_profile(out)
    linear = [e for e in profile.operators if e.operator == "aten.linear.default"]
    assert {e.shapes_in[0] for e in linear} == {(24, 16), (12, 16), (24, 8)}
    assert all(e.forward > 0 and e.backward > 0 for e in linear) and not profile.skipped
    assert len(profile.collectives) == 20 and all(c.seconds > 0 for c in profile.collectives)
    overheads = profile.overheads
    assert len(overheads.crowding) == 2 and 0 < overheads.crowding[0] <= overheads.crowding[1]
    assert (
        "besides: a statement" in said.out and "2 at once x" in said.out and "of 3 programs, up to 2 ranks" in said.err
    )
    cost = TableCost(profile)
    assert cost.collective("all_reduce", 4096, AxisPlace(2)) > 0 and cost.identity.startswith("table:")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert main(["profile", str(tmp_path / "none.py"), "--out", str(out)]) == 2
    assert "there is no file" in capsys.readouterr().err and not out.exists()
    assert main(["profile", "none.py", "--out", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err
    assert main(["profile", "none.py", "--ranks", "0"]) == 2
    assert "0 is not at least 1" in capsys.readouterr().err


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(TEMPLATE, encoding="utf-8")

    def fails(*_: object) -> tuple[float, float]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("nnscaler.performance.measure_operators_and_collectives.time_call", fails)
    out = tmp_path / "p.json"
    assert main(["profile", str(tmp_path / "model.py"), "--ranks", "1", "--seconds", "1", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "not measured: aten.linear.default(float32, float32, float32): RuntimeError: no such kernel" in said.err
    assert "calibration error of operators: nothing was measured" in said.out
