"""Behaviour of the user's own code: it prints, it raises, its policy is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnscaler.cli.main import main

MODEL = """
import torch
print("imported")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x):
        print("forward")
        return self.proj(x).square().mean()

def build_model():
    print("built")
    return Model()

def sample_inputs():
    return (torch.ones(4, 4),)
"""
POLICIES = """
import nnscaler

def raises(graph, ranks):
    return 1 / 0

def too_few(graph):
    return None

def garbage(graph, ranks):
    return 7

def good(graph, ranks):
    return nnscaler.Plan((("dp", ranks),))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "policies.py").write_text(POLICIES)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    return tmp_path


def verify(folder: Path, plan: str, *more: str) -> int:
    return main(["verify-plan", f"{folder}/model.py", "--ranks", "2", "--backend", "simulator", "--plan", plan, *more])


def test_what_the_model_prints_is_no_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, "dp=2", "--output-format", "json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"] == "VERIFIED"
    assert "imported\n" in captured.err and "built\n" in captured.err and "forward\n" in captured.err


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("policies.py::raises", ["ZeroDivisionError", "policies.py:5   return 1 / 0"]),
        ("policies.py::too_few", ["TypeError", "def too_few(graph, ranks)"]),
        ("policies.py::garbage", ["returned int"]),
        ("policies.py::missing", ["has no function missing"]),
        ("broken.py::policy", ["no_such_module_anywhere", "broken.py:1"]),
    ],
)
def test_a_wrong_policy_is_the_user_s(
    folder: Path, policy: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder, f"{folder}/{policy}") == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error


def test_a_policy_makes_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder, f"{folder}/policies.py::good") == 0
    assert "dp=2: made by good" in capsys.readouterr().err
