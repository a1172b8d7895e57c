"""`--loss-fn`, and the notes of a trace in the report of `verify-plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main

MODEL = """\
import torch
from torch.nn import functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 6)

    def forward(self, x):
        h = self.layer(x)
        if x.sum() > 10000:
            h = h * 2
        return h

class Straight(Net):
    def forward(self, x):
        return self.layer(x)

def straight():
    return Straight()

def branching():
    return Net()

def sample_inputs():
    return {"x": torch.randn(6, 8), "labels": torch.tensor([0, 1, 2, 3, 4, 5])}

def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])

def wrong(outputs):
    return outputs.sum()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def arguments(model: Path, factory: str, *more: str) -> list[str]:
    common = ["--ranks", "2", "--plan", "dp=2", "--backend", "simulator", "--quick", "-q", "--level", "run"]
    return ["verify-plan", f"{model}::{factory}", *common, *more]


def test_a_loss_outside_of_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(model, "straight", "--loss-fn", f"{model}::loss")) == 0
    assert "VERIFIED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "message"),
    [("wrong", "is no loss function"), ("absent", "is no loss function"), ("../other.py::loss", "there is no file")],
)
def test_what_is_no_loss_function(model: Path, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = value if "::" in value else f"{model}::{value}"
    assert main(arguments(model, "straight", "--loss-fn", target)) == 2
    assert message in capsys.readouterr().err


def test_the_branch_that_was_taken_is_in_the_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = ("--loss-fn", f"{model}::loss")
    assert main(arguments(model, "branching", *loss)) == 2
    assert "--specialise" in capsys.readouterr().err
    assert main(arguments(model, "branching", *loss, "--specialise")) == 0
    assert (
        "net.py:11: a branch on the values of data; only the one that the sample batch takes" in capsys.readouterr().out
    )
