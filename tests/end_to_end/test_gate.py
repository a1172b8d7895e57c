"""`nnscaler gate` as a user types it: exit codes, budget, isolation, the baseline, an interrupt, and its reports."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nnscaler.cli.main import main

OPS = """
import os
import nnscaler
from torch import Tensor


@nnscaler.register_op("m k+, k+ n -> m n", name="{0}_right")
def right(a: Tensor, b: Tensor) -> Tensor:
    print("printed by the operator")
    return a @ b


@nnscaler.register_op("a b -> a b", name="{0}_wrong")
def wrong(x: Tensor) -> Tensor:
    return x.softmax(-1)


@nnscaler.register_op("a b -> a b", name="{0}_dies")
def dies(x: Tensor) -> Tensor:
    os.abort()
"""
MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.layer(x), labels)


def build_model():
    return Model()


def crashes():
    import ctypes
    ctypes.string_at(0)


def hangs():
    import pathlib, time
    pathlib.Path(__file__).with_name("hanging").touch()
    time.sleep(600)


def sample_inputs():
    return {"x": torch.randn(12, 8), "labels": torch.randint(0, 4, (12,))}
"""
UPDATE = ("--update-baseline", "--owner", "ann", "--expires", "2999-01-01", "--reason", "why")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    Path("ops.py").write_text(OPS.format(f"gate_{name}"), encoding="utf-8")
    Path("model.py").write_text(MODEL, encoding="utf-8")
    return tmp_path


def configure(text: str, *models: str) -> None:
    """Writes the settings; each model with one quick plan on two threads."""
    plans = 'plans = [{ ranks = 2, plan = "dp=2", backend = "simulator", depth = "quick" }]'
    tables = "".join(f'[[tool.nnscaler.gate.models]]\nmodel = "{model}"\n{plans}\n' for model in models)
    Path("pyproject.toml").write_text(f"[tool.nnscaler.gate]\n{text}\n{tables}", encoding="utf-8")


def row(text: str, item: str) -> list[str]:
    """The cells of an item's row, after its name."""
    name = item.replace("_", "\\_")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.long
def test_all_is_well(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure("", "model.py")
    with Path("pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('[tool.nnscaler.gate.ops]\nnames = ["ops.py::right"]\n')
    assert main(["gate", "--output-format", "junit=g.xml", "--output-format", "sarif=g.sarif"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("### nnscaler gate: VERIFIED\n\n2 items: 2 verified; ")
    assert row(shown.out, "model.py ranks=2")[0] == "VERIFIED"
    assert row(shown.out, "ops.py::right")[0] == "VERIFIED"
    assert "printed by the operator" not in shown.out
    assert "2 of 2  PASS" in shown.err
    assert ElementTree.parse("g.xml").getroot().get("failures") == "0"
    assert json.loads(Path("g.sarif").read_text(encoding="utf-8"))["runs"][0]["results"] == []
    assert main(["gate", "--only", "right"]) == 0
    assert "1 unchanged since they passed" in capfd.readouterr().out
    assert main(["gate", "--only", "right", "--no-cache"]) == 0
    assert "unchanged" not in capfd.readouterr().out


@pytest.mark.long
def test_one_that_is_wrong_one_that_dies_and_one_that_cannot_run(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("", "model.py", "model.py::crashes", "gone.py")
    with Path("pyproject.toml").open("a", encoding="utf-8") as file:
        file.write('[tool.nnscaler.gate.ops]\nfiles = ["ops.py", "none.py"]\n')
    assert main(["gate", "--output-format", "json=g.json"]) == 2
    text, progress = capfd.readouterr()
    counts = [tuple(map(int, found)) for found in re.findall(r"(\d+) of (\d+)  [A-Z]", progress)]
    assert counts[-1] == (6, 6) and all(done <= every for done, every in counts)
    assert text.startswith("### nnscaler gate: COULD NOT RUN\n")
    assert row(text, "gone.py ranks=2")[0] == "COULD NOT RUN"
    assert row(text, "model.py::crashes ranks=2")[0] == "INCONCLUSIVE"
    assert row(text, "model.py ranks=2")[0] == "VERIFIED"
    assert row(text, "ops.py::right")[0] == "VERIFIED"
    assert row(text, "ops.py::wrong")[0] == "REFUTED"
    assert row(text, "ops.py::dies")[0] == "INCONCLUSIVE"
    for told in ("killed by SIGSEGV", "there is no file 'gone.py'", "reproduce: nnscaler reproduce nns1:"):
        assert told in text
    gate = json.loads(Path("g.json").read_text(encoding="utf-8"))["gate"]
    assert gate["exit_code"] == 2
    assert main(["gate", "--only", "wrong", "--only", "right"]) == 1
    assert main(["gate", "--only", "dies"]) == 3


@pytest.mark.long
def test_the_baseline(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure('baseline = "known.toml"\n[tool.nnscaler.gate.ops]\nnames = ["ops.py::right", "ops.py::wrong"]')
    assert main(["gate"]) == 1, "one that does not exist yet knows of nothing"
    told = capfd.readouterr()
    assert "warning: there is no baseline known.toml yet, so no finding is known; to write it:\n" in told.err
    (line,) = (line for line in told.err.splitlines() if line.startswith("  nnscaler gate "))
    assert line == "  nnscaler gate --update-baseline --owner NAME --expires YYYY-MM-DD --reason TEXT"
    assert main(["gate", "--baseline", "not here.toml", "--only", "right"]) == 0, "and asks for none"
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("  nnscaler gate "))
    words = shlex.split(line.replace("YYYY-MM-DD", "2999-01-01"))
    assert main(words[1:]) == 0, "what it says writes it"
    assert "ops.py::wrong" in Path("not here.toml").read_text()
    assert main(["gate", "--baseline", "not here.toml"]) == 0
    Path("a folder").mkdir()
    assert main(["gate", "--baseline", "a folder"]) == 2, "what is there and no baseline is an error"
    capfd.readouterr()
    assert main(["gate", *UPDATE]) == 0
    text = capfd.readouterr().out
    assert text.startswith("### nnscaler gate: VERIFIED but for known findings\n")
    assert row(text, "ops.py::wrong")[0] == "KNOWN"
    assert main(["gate"]) == 0
    assert "known until 2999-01-01, owner: ann (why)" in capfd.readouterr().out
    known = Path("known.toml")
    written = known.read_text(encoding="utf-8")
    known.write_text(written.replace("2999-01-01", "2020-01-01"), encoding="utf-8")
    assert main(["gate"]) == 1
    assert "has expired on 2020-01-01" in capfd.readouterr().out
    known.write_text(written, encoding="utf-8")
    source = Path("ops.py").read_text(encoding="utf-8")
    Path("ops.py").write_text(
        source.replace(
            '"a b -> a b", name="gate_test_the_baseline_w', '"a b^ -> a b^", name="gate_test_the_baseline_w'
        ),
        encoding="utf-8",
    )
    assert main(["gate"]) == 1
    assert "does not occur any more" in capfd.readouterr().out
    assert main(["gate", *UPDATE]) == 0
    assert "[[finding]]" not in known.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--update-baseline"], "--update-baseline needs --owner, --expires, --reason"),
        ([*UPDATE[:4], "2020-01-01", *UPDATE[5:]], "--expires 2020-01-01 is in the past"),
        (list(UPDATE), "--update-baseline does not know which file"),
        (["--only", "nothing"], "no item of the gate matches 'nothing'"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--budget", "soon"], "'soon' is no time"),
        (["--output-format", "junit=/dev/null/x"], "cannot write"),
    ],
)
def test_wrong_usage(project: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    configure("", "model.py")
    assert main(["gate", *arguments]) == 2
    shown = capfd.readouterr()
    assert message in shown.err
    assert not shown.out


def test_wrong_settings_are_told_with_their_place(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text("[tool.nnscaler.gate]\nbudgett = 1\n", encoding="utf-8")
    assert main(["gate"]) == 2
    told = capfd.readouterr().err
    assert "pyproject.toml:2" in told
    assert "did you mean budget?" in told


def test_list_and_show_config_run_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure('budget = "9s"\n[tool.nnscaler.gate.ops]\nfiles = ["ops.py"]', "model.py")
    assert main(["gate", "--list"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "model.py ranks=2 plan=dp=2 backend=simulator depth=quick",
        "ops.py::right",
        "ops.py::wrong",
        "ops.py::dies",
    ]
    assert main(["gate", "--show-config", "--seed", "4"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["budget", "9", "s", "pyproject.toml:2"] in lines
    assert ["seed", "4", "--seed"] in lines


def test_what_does_not_fit_into_the_budget_is_no_pass(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure("", "model.py::hangs")
    assert main(["gate", "--budget", "3s"]) == 3
    text = capfd.readouterr().out
    assert text.startswith("### nnscaler gate: INCONCLUSIVE\n")
    assert row(text, "model.py::hangs")[0] == "NOT RUN"
    assert "was not run: budget" in text


def test_in_github_actions(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    configure('[tool.nnscaler.gate.ops]\nnames = ["ops.py::wrong"]')
    assert main(["gate"]) == 1
    text = capfd.readouterr().out
    assert "::error title=nnscaler (annotation_wrong),file=ops.py,line=14::" in text
    assert Path("summary.md").read_text(encoding="utf-8").startswith("### nnscaler gate: REFUTED\n")


@pytest.mark.long
def test_a_machine_format_on_stdout_is_alone_there(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure('[tool.nnscaler.gate.ops]\nnames = ["ops.py::right"]')
    assert main(["gate", "--output-format", "json"]) == 0
    assert json.loads(capfd.readouterr().out)["gate"]["verdict"] == "VERIFIED"


def test_an_interrupt_shows_what_is_known_and_leaves_nothing(project: Path) -> None:
    configure('[tool.nnscaler.gate.ops]\nnames = ["ops.py::right"]', "model.py::hangs")
    command = [sys.executable, "-P", "-m", "nnscaler", "gate", "--color", "never"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as gate:
        assert gate.stderr is not None
        while gate.poll() is None and not (project / "hanging").exists():
            time.sleep(0.05)
        gate.send_signal(signal.SIGINT)
        out, err = gate.communicate()
    assert gate.returncode == 130, err
    assert out.startswith("### nnscaler gate: INCONCLUSIVE, interrupted\n"), out
    assert "was not run: interrupted" in out
    assert _session(gate.pid) == []


def _session(leader: int) -> list[str]:
    """The processes of a session that still run."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(leader)], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_in_a_clean_environment() -> None:
    script = Path(__file__).resolve().parents[2] / "ci" / "gate_test.sh"
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "### nnscaler gate: VERIFIED\n" in result.stdout
