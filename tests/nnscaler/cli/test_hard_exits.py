"""User code that ends the process: no command ends with 0, nor with the code of a verdict that it does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import every

TEXT = """
import atexit
import os
import sys
import threading

import nnscaler
import torch
from torch import nn


def in_thread():
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        {forward}
        return self.layer(x).square().mean()


def build_model():
    {build}
    return Model()


def sample_inputs():
    return {{"x": torch.randn(4, 8)}}


@nnscaler.register_op("a b -> a b", name="hard_exit")
def operator(x: torch.Tensor) -> torch.Tensor:
    {operator}
    return 2 * x


def model():  # of a check file
    {build}
    return Model()


def batch():
    return torch.randn(4, 8)


def step(model, batch):
    return model(batch)


def parallelize(model, mesh):
    {parallelize}
    return model


mesh = ("dp",)
{imported}
"""
PLAN = ("--ranks", "2", "--plan", "dp=2")
COMMANDS = {
    "verify-plan": ("verify-plan", "file.py", *PLAN, "--backend", "simulator", "--quick"),
    "compile": ("compile", "file.py", *PLAN, "--out", "program"),
    "verify-op": ("verify-op", "file.py::operator"),
    "verify-external": ("verify-external", "file.py", "--ranks", "2", "--level", "run"),
}
GATE = '[[tool.nnscaler.gate.models]]\nmodel = "file.py"\nplans = [{ ranks = 2, plan = "dp=2", backend = "simulator" }]'


def run(folder: Path, words: tuple[str, ...], **places: str) -> tuple[int, str]:
    """Run a command on the file with these statements at its places; return the exit code, and what it says."""
    text = TEXT.format(
        **{**dict.fromkeys(("forward", "build", "operator", "parallelize", "imported"), "pass"), **places}
    )
    (folder / "file.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "nnscaler", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "place", "statement"),
    every(
        6,
        [
            ("verify-plan", "imported", "os._exit(0)"),
            ("verify-plan", "build", "os._exit(1)"),
            ("verify-plan", "forward", "os._exit(0)"),
            ("verify-plan", "forward", "sys.exit(0)"),
            ("compile", "build", "os._exit(0)"),
            ("compile", "forward", "sys.exit(0)"),
            ("verify-op", "imported", "os._exit(0)"),
            ("verify-op", "imported", "sys.exit(0)"),
            ("verify-external", "imported", "os._exit(0)"),
            ("verify-external", "build", "os._exit(0)"),
            ("verify-external", "build", "sys.exit(0)"),
        ],
    ),
)
def test_it_could_not_run(command: str, place: str, statement: str, tmp_path: Path) -> None:
    code, said = run(tmp_path, COMMANDS[command], **{place: statement})
    assert (code, statement in said, "Traceback" in said) == (2, True, False), said


@pytest.mark.long
def test_in_a_thread(tmp_path: Path) -> None:
    code, said = run(tmp_path, COMMANDS["verify-plan"], forward="in_thread()")
    assert (code, "user code ended the process: os._exit(0) in a thread" in said) == (2, True), said


@pytest.mark.parametrize("statement", ["os._exit(0)", pytest.param("sys.exit(0)", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("command", "place"),
    every(2, [("verify-op", "operator"), ("verify-external", "parallelize"), ("verify-external", "forward")]),
)
def test_what_runs_in_processes_of_its_own_has_a_report(
    command: str, place: str, statement: str, tmp_path: Path
) -> None:
    code, said = run(tmp_path, COMMANDS[command], **{place: statement})
    assert code in (1, 2, 3), said


def test_items_of_a_gate_are_not_decided(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(GATE, encoding="utf-8")
    code, said = run(tmp_path, ("gate",), forward="os._exit(0)")
    assert (code, "ended: exited with code 0" in said) == (3, True), said


@pytest.mark.parametrize(
    ("operator", "code"), [("return x.softmax(-1)", 1), pytest.param("pass", 0, marks=pytest.mark.long)]
)
def test_an_exit_handler_changes_no_verdict(operator: str, code: int, tmp_path: Path) -> None:
    found, said = run(
        tmp_path, COMMANDS["verify-op"], operator=operator, imported="atexit.register(lambda: os._exit(0))"
    )
    assert found == code, said
