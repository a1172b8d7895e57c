"""Ranks that `nnscaler train` starts itself, and what is said where they end early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnscaler.cli.signals import Terminated, tell_end
from nnscaler.errors import NnscalerError
from nnscaler.training.run_ranks_as_processes import LOST, STORE, Rank, _told, code_of_same_error, first_to_fail

MODEL = """
import os
import torch
from operators import Square

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return Square.apply(y).mean() if not BRANCHES or y.sum() > 0 else y.mean()

BRANCHES = bool(os.environ.get("BRANCHES"))

def build_model(): return Model()
"""
DATA = """
import os
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if os.environ.get("BROKEN") == os.environ["RANK"]:
            raise ValueError("a row is broken")
        return {"x": torch.randn(4)}

def datasets(): return Rows()

def stop_alone(trainer):
    if trainer.engine.rank == 1:
        trainer.stop()
"""
OPERATORS = """
import os
import torch

if os.environ.get("BROKEN_OPERATOR") == os.environ["RANK"]:
    raise ValueError("an operator is broken")

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]
"""
RUN = """
model = "model.py"
plan = "dp=2"
steps = 2
[data]
source = "data.py::datasets"
batch_size = 4
[optimizer]
name = "SGD"
"""


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (("--optimizer.foo=2",), "", "SGD takes no 'foo'"),  # each rank finds it by itself
        pytest.param((), "BRANCHES", "torch.export cannot trace the model", marks=pytest.mark.long),  # rank 0 tells
    ],
)
def test_what_every_rank_ends_with_is_said_once(
    tmp_path: Path, words: tuple[str, ...], variable: str, message: str
) -> None:
    code, said = run(tmp_path, *words, **({variable: "1"} if variable else {}))
    assert code == 2
    assert said.count(message) == 1
    assert "ended with" not in said


def test_what_one_rank_ends_with_is_said_with_its_number(tmp_path: Path) -> None:
    code, said = run(tmp_path, BROKEN="1")
    assert code == 2
    assert (
        "error: rank 1 ended with exit code 2, and the run with it\n  error: reading the data raises ValueError" in said
    )


@pytest.mark.long
def test_a_rank_that_cannot_start_is_said_and_not_what_the_others_lost(tmp_path: Path) -> None:
    code, said = run(tmp_path, BROKEN_OPERATOR="1")
    assert code == 2 and "internal error" not in said
    assert "error: rank 1 ended with exit code 2" in said and "an operator is broken" in said


@pytest.mark.parametrize("code", [2, 130])  # 130: as all of them may end together
def test_the_rank_that_left_another_is_the_cause_although_it_ends_later(code: int) -> None:
    codes = {0: f"raise SystemExit({LOST})", 1: f"import time; time.sleep(0.5); raise SystemExit({code})"}
    ranks = [Rank(n, subprocess.Popen([sys.executable, "-S", "-c", code]), None) for n, code in codes.items()]
    cause = first_to_fail(ranks, {0, 130})
    assert cause is not None and cause.number == 1


def test_a_rank_that_is_ended_leaves_it_to_the_command_to_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else its own word would stand before the cause."""
    assert (tell_end(Terminated()), capsys.readouterr().err) == (143, "terminated\n")
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    assert (tell_end(Terminated()), capsys.readouterr().err) == (143, "")
    rank = Rank(0, subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(143)"]), None)
    rank.process.wait()
    with pytest.raises(NnscalerError, match="rank 0 was ended by SIGTERM, and the run with it"):
        _told(rank, tmp_path)


def test_a_rank_that_lost_others_has_said_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "error_0").write_text("rank 1 is gone")
    first = Rank(0, subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({LOST})"]), None)
    first.process.wait()
    assert code_of_same_error(first, first, tmp_path) is None


SLOW = """
import sys, threading, time, types
from datetime import timedelta
import torch.distributed

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

sys.modules["slow"] = types.ModuleType("slow")  # which Python takes down while the thread comes back
sys.modules["slow"].held = Slow()
waited = lambda: torch.distributed.HashStore().wait(["never"], timedelta(seconds=1.0))
"""
COMMAND = """
import nnscaler.cli.main
from nnscaler.cli.console_script import run_process
threading.Thread(target=waited, daemon=True).start()
nnscaler.cli.main.main = lambda: 3
sys.exit(run_process())
"""
SCRIPT = """
from nnscaler.runtime.communication.ordered_collective_thread import Lane
Lane("sums").run(waited)
time.sleep(0.2)
raise ERROR
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (COMMAND, 3),
        (SCRIPT.replace("ERROR", "ValueError"), 1),
        pytest.param(SCRIPT.replace("ERROR", "KeyboardInterrupt"), 130, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_ends_with_its_code_although_a_thread_waits_for_another(text: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "RANK": "0"}
    command = [sys.executable, "-c", SLOW + text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and "terminate called" not in done.stderr, done.stderr


def test_a_hook_of_one_rank_alone_stops_all_of_them(tmp_path: Path) -> None:
    """Rank 1 finds the model's operator in a file that nothing else imports there."""
    code, said = run(tmp_path, f"--hooks.on_step={tmp_path}/data.py::stop_alone")
    assert code == 0 and "stopped      after step 1" in said


def run(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """The exit code of a run of two ranks, and what it says."""
    for name, text in {"model.py": MODEL, "data.py": DATA, "operators.py": OPERATORS, "run.toml": RUN}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "nnscaler", "train", folder.name + "/run.toml", *words]
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    found = subprocess.run(
        command, cwd=folder.parent, env=given, capture_output=True, text=True, check=False, timeout=120
    )
    return found.returncode, found.stderr
