"""Operators that a model registers when it is built or run: `user = true` takes them too; no import shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import nnscaler
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        {forward}
        return operator(self.layer(x)).square().mean()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def build_model():
    {build}
    return Model()


def sample_inputs():
    return {{"x": torch.randn(4, 8)}}
"""
LATER = """
import nnscaler
import torch


@nnscaler.register_op("a b -> a b", name="gate_later")
def later(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)
"""
SETTINGS = """
[tool.nnscaler.gate]
[[tool.nnscaler.gate.models]]
model = "model.py"
plans = [{ ranks = 2, plan = "dp=2", backend = "simulator", steps = 1, depth = "quick" }]
[tool.nnscaler.gate.ops]
user = true
"""
BUILT = 'globals()["operator"] = nnscaler.register_op("a b -> a b", name="gate_built")(doubled)'


def project(folder: Path, forward: str, build: str = "pass") -> None:
    (folder / "model.py").write_text(MODEL.format(forward=forward, build=build), encoding="utf-8")
    (folder / "later.py").write_text(LATER, encoding="utf-8")
    (folder / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")


def run(folder: Path, *words: str) -> tuple[int, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout.replace("\\_", "_") + done.stderr


def test_what_forward_imports_is_verified(tmp_path: Path) -> None:
    project(tmp_path, "from later import later as operator")
    code, said = run(tmp_path, "nnscaler", "gate")
    assert code == 1, said
    assert "| later.py::later | REFUTED |" in said
    assert "| model.py ranks=2 plan=dp=2 backend=simulator steps=1 depth=quick | VERIFIED |" in said
    assert "an operator more" in said


@pytest.mark.long
def test_a_test_of_the_plan_is_one_of_them_too(tmp_path: Path) -> None:
    project(tmp_path, "from later import later as operator")
    code, said = run(tmp_path, "pytest", "-p", "no:cacheprovider", "--nnscaler-gate")
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "REFUTED  later.py::later" in said


@pytest.mark.long
def test_what_is_registered_when_the_model_is_built_is_verified(tmp_path: Path) -> None:
    """Importing the file registers nothing: the model is built and traced before the operator is verified."""
    project(tmp_path, "pass", BUILT)
    code, said = run(tmp_path, "nnscaler", "gate")
    assert code == 0, said
    assert "| model.py::doubled | VERIFIED | PROVED (all sizes) |" in said


def test_models_without_an_operator_cannot_be_what_was_meant(tmp_path: Path) -> None:
    project(tmp_path, "operator = torch.relu")
    code, said = run(tmp_path, "nnscaler", "gate")
    assert code == 2, said
    assert "the models register no operator" in said and "take `user = true` out of ops" in said


@pytest.mark.long
def test_known_findings_of_them_are_known_where_no_plan_runs(tmp_path: Path) -> None:
    project(tmp_path, "from later import later as operator\n        import named")
    (tmp_path / "named.py").write_text(
        LATER.replace("later", "named").replace(".softmax(-1)", " * 2"), encoding="utf-8"
    )
    (tmp_path / "extra.py").write_text(
        LATER.replace("later", "extra").replace(".softmax(-1)", " * 2"), encoding="utf-8"
    )
    text = SETTINGS.replace("user = true", 'user = true\nfiles = ["extra.py"]')
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    blame = ["--owner", "ann", "--expires", "2999-01-01", "--reason", "why"]
    words = ["gate", "--baseline", "known.toml"]
    assert run(tmp_path, "nnscaler", *words, "--update-baseline", *blame)[0] == 0
    assert 'item = "later.py::later"' in (tmp_path / "known.toml").read_text(encoding="utf-8")
    code, said = run(tmp_path, "nnscaler", *words, "--only", "extra.py")
    assert code == 0 and "does not occur any more" not in said, said
    code, said = run(tmp_path, "nnscaler", *words)
    assert code == 0 and "| later.py::later | KNOWN |" in said, said
