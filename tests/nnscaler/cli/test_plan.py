"""`nnscaler plan`: a plan, its certificate, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.transform.plan import Plan
from tests.sampling import only

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "gpt.py")


def test_a_plan_is_found_explained_written_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, certificate, kept = tmp_path / "plan.json", tmp_path / "certificate.json", tmp_path / "kept.toml"
    kept.write_text("[[constraint]]\nkind = 'sizes'\ntp = 2\npp = 2\n")
    words = [
        "plan",
        EXAMPLE,
        "--ranks",
        "4",
        "--cluster",
        "a100x8",
        "--constraints",
        str(kept),
        "--explain",
        "linear_3",
    ]
    assert main([*words, "--out", str(plan), "--certificate", str(certificate)]) == 0
    shown = capsys.readouterr().out
    assert "tp=2 pp=2" in shown and "gap" in shown and "stage 1: layers 2..3" in shown
    assert "taken" in shown and "a step" in shown and "aten.linear.default" in shown
    assert Plan.from_json(plan.read_text()).describe() == "tp=2 pp=2"
    told = json.loads(certificate.read_text())
    assert told["bound_seconds"] <= told["objective_seconds"] and told["cluster"] == "a100x8"
    assert main(["verify-plan", EXAMPLE, "--ranks", "4", "--plan", str(plan), "--backend", "simulator", "--quick"]) == 0


@pytest.mark.parametrize("zero", only((1,), [1, 2]))
def test_shards_between_steps_are_found_told_and_verified(
    zero: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, kept = tmp_path / "plan.json", tmp_path / "kept.toml"
    kept.write_text(f"[[constraint]]\nkind = 'sizes'\ndp = 2\nzero = {zero}\nmicro_batches = 6\n")
    words = [EXAMPLE, "--ranks", "2"]
    assert main(["plan", *words, "--cluster", "a100x8", "--constraints", str(kept), "--out", str(plan)]) == 0
    shown = capsys.readouterr().out
    assert f"dp=2 zero={zero}, 6 micro-batches" in shown and ("of whole gradients" in shown) == (zero == 2)
    assert Plan.from_json(plan.read_text()).describe() == f"dp=2 zero={zero}"
    assert main(["verify-plan", *words, "--plan", str(plan), "--backend", "simulator", "--quick"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "h100"], "h100x8"),
        (["--cluster", "a100x8", "--memory", "lots"], "--memory 80GB"),
        (["--cluster", "a100x8", "--memory", "100kB"], "no plan for 4 ranks"),
        (["--cluster", "a100x8", "--explain", "nowhere"], "nowhere"),
        (["--cluster", "a100x8", "--constraints", "not_there.toml"], "not_there.toml"),
        (["--profile", "not_there.json"], "not_there.json"),
    ],
)
def test_errors_say_the_way_out(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", EXAMPLE, "--ranks", "4", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err


def test_auto_is_searched_where_a_plan_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "4", "--backend", "simulator", "--level", "static"]
    assert main(["verify-plan", EXAMPLE, "--plan", "auto:ethernet10g", *words]) == 0
    shown = capsys.readouterr()
    assert "above the best in the space searched" in shown.out + shown.err
    assert main(["verify-plan", EXAMPLE, "--plan", "auto:nowhere", *words]) == 2
    assert "h100x8" in capsys.readouterr().err
