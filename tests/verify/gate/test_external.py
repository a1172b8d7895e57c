"""Programs of others in a gate: run as items, with findings, known ones and replays like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnscaler.cli.main import main
from verify.external.load_check_file import TEMPLATE
from verify.external.request import ExternalRequest
from verify.gate.items import ExternalItem
from verify.gate.run_items_within_budget import tool_of
from verify.gate.run_order import State, batches, first_units, other_units
from verify.gate.verify_item import verify_external_item
from verify.programs.loaded_model_and_plan import RunContext

WRONG = "\n\ndef forgotten(model, mesh):\n    return model\n"
SETTINGS = """
[tool.nnscaler.gate]
baseline = "known.toml"
[[tool.nnscaler.external]]
target = "check.py"
ranks = 2
steps = 1
level = "run"
[[tool.nnscaler.external]]
target = "check.py::forgotten"
ranks = 2
steps = 1
[[tool.nnscaler.external]]
target = "gone.py"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("check.py").write_text(TEMPLATE + WRONG, encoding="utf-8")
    Path("pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    return tmp_path


def test_a_gate_of_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("known.toml").write_text("", encoding="utf-8")
    words = ["gate", "-q", "--output-format", "json=report.json"]
    assert main(words) == 2, "one could not be run"
    out = capsys.readouterr().out
    for line in (
        "| check.py ranks=2 steps=1 level=run | VERIFIED | TESTED (exact) |",
        "| check.py::forgotten ranks=2 steps=1 | REFUTED | REFUTED |",
        "| gone.py | COULD NOT RUN | none | 0 |",
    ):
        assert line in out.replace("\\_", "_"), out
    assert main(["gate", "-q", "--only", "forgotten", "--output-format", "json=report.json"]) == 1
    capsys.readouterr()
    (document,) = [json.loads(Path("report.json").read_text())]
    (reproduce, *_) = [finding["reproduce"] for finding in document["findings"]]
    assert main([*reproduce.split()[1:], "-q"]) == 1
    capsys.readouterr()
    blame = ["--owner", "ann", "--expires", "2999-01-01", "--reason", "why"]
    assert main(["gate", "-q", "--only", "forgotten", "--update-baseline", *blame]) == 0
    assert 'item = "check.py::forgotten ranks=2 steps=1"' in Path("known.toml").read_text()
    assert main(["gate", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "gone.py"


def test_it_runs_alone_and_has_no_text_to_read() -> None:
    items = [ExternalItem(name, ExternalRequest(name)) for name in ("a.py", "b.py")]
    assert first_units(items, State()) == []
    units = other_units(items, State(), (), ())
    assert [[unit.item.name for unit in batch] for batch in batches(units, 4)] == [["a.py"], ["b.py"]]
    assert {tool_of(item) for item in items} == {"verify-external"}


def test_several_programs_of_an_item_are_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.transformers.expand_requests.targets", lambda: ["llama", "no_such_model"])
    request = ExternalRequest("hf:all", tp=(2,), steps=1, level="run")
    notes: list[str] = []
    report = verify_external_item(ExternalItem("models", request), RunContext(say=notes.append))
    assert (report.subject, report.setting, report.verdict.word) == ("models", "2 programs", "INCONCLUSIVE")
    assert [finding.code for finding in report.findings] == ["could_not_run"]
    assert any(check.name == "hf:llama --tp 2 on 2 ranks (tp=2), in float64: gradients" for check in report.checks)
    assert notes[0] == "loading hf:all"
