"""A run: the loop that settings describe, resumed exactly, ended in order, and by the command on real ranks."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.training.trainer import Result, Trainer

MODEL = """\
import os
import signal

import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 4)

    def forward(self, x, labels):
        h = F.dropout(torch.relu(self.first(x)), 0.2, self.training)
        return F.cross_entropy(self.second(h), labels)


class Shifted(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x, labels):
        return super().forward(x + self.shift, labels)


class Points(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return {"x": x, "labels": (x[0] > 0).long() + 2 * (x[1] > 0).long()}


def build_model():
    return Model()


def datasets():
    return Points(44, 0), Points(21, 1)


def broken():
    points = Points(44, 0)
    points.x[30] = float("nan")
    return points


class Branches(Model):
    def forward(self, x, labels):
        x = -x if x.mean() > 0 else x
        return super().forward(x, labels)


class Counts(Model):
    seen = 0

    def forward(self, x, labels):
        self.seen += 1
        return super().forward(x, labels)


def more():
    return [{**row, "id": i} for i, row in enumerate(Points(44, 0))]


def wide():
    return [{**row, "x": row["x"].double()} for row in Points(44, 0)]


class Raising(Points):
    def __getitem__(self, index):
        return {"x": self.x[index], "labels": torch.tensor(int("many"))}


def raising():
    return Raising(44, 0)


def die(trainer):  # of rank 1, once
    if trainer.step == 3 and trainer.engine.rank == 1 and os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)


def die_first(trainer):  # of rank 1, where torchrun has not restarted it
    if trainer.step == 3 and trainer.engine.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def say(trainer):
    print("hook", trainer.step, trainer.loss == trainer.loss)


def stop(trainer):
    if trainer.step == 2:
        trainer.stop()


def down(optimizer, total_steps, least=0.0):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(least, 1 - step / total_steps))


def tell_rate(trainer):
    print("rate", trainer.step, trainer.schedule.get_last_lr()[0])


def slow(trainer):
    __import__("time").sleep(0.5)
"""
RUN = """\
model = "model.py"
steps = 7
clip = 1.0
check_replicas_every = 2

[data]
source = "model.py::datasets"
batch_size = 8

[optimizer]
lr = 0.05
groups = { "*.bias" = { weight_decay = 0.0 } }

[schedule]
name = "OneCycleLR"
max_lr = 0.05
total_steps = 7

[precision]
dtype = "float64"

[validation]
every = 3
batch_size = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*words: str) -> int:
    return main(["train", "-q", "run.toml", *words])


def losses(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", text, re.MULTILINE)}


def fields(**more: Any) -> dict[str, Any]:
    found = {"model": "model.py", "data": {"source": "model.py::datasets", "batch_size": 8}, "steps": 4}
    return {**found, "precision": {"dtype": "float64"}, "optimizer": {"name": "SGD", "lr": 0.1}, **more}


def fit(**more: Any) -> tuple[Trainer, Result, list[str]]:
    lines: list[str] = []
    trainer = Trainer(write=lines.append, **fields(**more))
    return trainer, trainer.fit(), lines


def test_every_program_is_proved_before_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verify.programs import static_check_of_recompiled_program  # read here: the command imports it when it runs

    proved: list[list[int]] = []
    right = static_check_of_recompiled_program.vouch

    def checked(program: Any) -> None:
        right(program)
        proved.append([entry.shape[0] for entry in program.manifest.inputs])

    monkeypatch.setattr(static_check_of_recompiled_program, "vouch", checked)
    assert train("--steps=6") == 0
    assert proved == [[8, 8], [5, 5], [1, 1], [4, 4]]  # training, validation of 21 rows by 5, the last 4 of 44 rows

    def wrong(program: Any) -> None:
        changed = {file: text.replace("relu(", "sigmoid(") for file, text in program.sources.items()}
        right(replace(program, sources=changed))

    monkeypatch.setattr(static_check_of_recompiled_program, "vouch", wrong)
    assert train("--steps=6") == 2


@pytest.mark.long
def test_the_console_has_a_line_for_each_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    told = capsys.readouterr().out.splitlines()
    found = losses("\n".join(told))
    assert list(found) == list(range(1, 8))
    assert all(repr(float(loss)) == loss for loss in found.values())
    rest = [line for line in told if not re.match(r"step \d+  loss ", line)]
    assert [line.rpartition(" ")[0] for line in rest] == [f"step {n}  validation loss" for n in (3, 6, 7)]


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of the second epoch, with dropout, a schedule and AdamW's moments."""
    assert train("--checkpoints.folder=whole", "--checkpoints.every=2") == 0
    whole = capsys.readouterr().out
    assert train("--checkpoints.folder=parts", "--steps=5") == 0
    first = capsys.readouterr().out
    assert train("--checkpoints.folder=parts", "--checkpoints.asynchronous") == 0
    assert losses(first) | losses(capsys.readouterr().out) == losses(whole)
    assert {path.name for path in (folder / "whole").iterdir()} == {
        "step_000004", "step_000006", "step_000007", "best", "last"
    }  # fmt: skip
    assert train("--checkpoints.folder=parts") == 0  # nothing is left to do
    assert losses(capsys.readouterr().out) == {}


def test_a_loss_that_is_no_number_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data.source=model.py::broken", "--validation.every=0", "--checkpoints.folder=runs")
    assert train(*words, "--checkpoints.every=1") == 3
    told = capsys.readouterr()
    steps = losses(told.out)
    assert steps[max(steps)] == "nan"
    assert f"the loss of step {max(steps)} is nan: stopped before the optimizer used it" in told.err
    saved = sorted(path.name for path in (folder / "runs").glob("step_*"))
    assert saved[-1] == f"step_{max(steps) - 1:06d}"


def test_epochs_end_a_run(folder: Path) -> None:
    trainer, result, lines = fit(steps=0, epochs=2)
    assert (result.ended, result.steps, len(lines)) == ("finished", 12, 12)  # 44 samples are 6 batches, one short
    assert trainer.engine.compilations == ["x 4x6, labels 4"] or len(trainer.engine.compilations) == 1


def test_accumulation_is_a_larger_batch(folder: Path) -> None:
    data = {"source": "model.py::datasets", "shuffle": False}
    wide, wide_result, _ = fit(data={**data, "batch_size": 16}, steps=2, module=plain())
    twice, result, _ = fit(data={**data, "batch_size": 8}, steps=2, accumulation=2, module=plain())
    assert result.loss == pytest.approx(wide_result.loss, rel=1e-14)
    for name, parameter in wide.engine.parameters.items():
        torch.testing.assert_close(twice.engine.parameters[name], parameter, rtol=1e-13, atol=0)


def plain() -> torch.nn.Module:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(6, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(x), labels)

    return Plain()


def test_hooks_are_called(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result, _ = fit(hooks={"on_step": ["model.py::say", "model.py::stop"]}, steps=9)
    assert (result.ended, result.steps) == ("stopped", 2)
    assert capsys.readouterr().out == "hook 1 True\nhook 2 True\n"


def test_steps_are_profiled(folder: Path) -> None:
    fit(profiler={"first": 2, "last": 3, "folder": "traces"}, module=plain())
    events = json.loads((folder / "traces" / "rank_0.json").read_text())["traceEvents"]
    assert any(event["name"] == "aten::linear" for event in events)


BAD = {
    "--model=none.py": "there is no file 'none.py'",
    "--data.source=model.py::nothing": "has no function nothing()",
    "--data.source=model.py::raising": "model.py:79   return",
    "--data.source=model.py::wide": "help: the rows have x as float64, and the model is float32",
    "--data.source=model.py::more": "help: a batch has what forward takes and nothing else",
    "--model=model.py::Branches": "in a function and register it: @nnscaler.register_op",
    "--optimizer.name=AdamX": "torch.optim has no such class",
    "--optimizer.momentun=1": "AdamW takes no 'momentun', which [optimizer] sets",
    "--schedule.name=Cosine": "`schedule.name` is 'Cosine'",
    "--schedule.max_lrs=1": "help: did you mean max_lr?",
    "--plan=tp=": "tp",
    "--steeps=3": "did you mean --steps or --seed?",
    "--hooks.on_step=model.py::nothing": "has no function nothing()",
    "--checkpoints.folder=model.py/a": "model.py",
    "--loggers.tensorboard=logs": "pip install tensorboard",
}


def test_a_note_on_the_model_is_a_warning_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model=model.py::Counts", "--steps=1", "--schedule.total_steps=1") == 0
    assert capsys.readouterr().err.startswith("warning: forward changes attributes that are no buffers")


def test_a_buffer_that_is_not_cast_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model=model.py::Shifted", "--steps=1", "--dtype=", "--precision.param=bfloat16") == 2
    told = capsys.readouterr().err
    assert "(model.py:15  `h = F.dropout(" in told and "buffers stay as they are, and `shift` is float32" in told


@pytest.mark.parametrize("word", BAD)
def test_what_cannot_be_trained_is_told(
    folder: Path, word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train(word, "--steps=1", "--validation.every=0", "--dtype=") == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert BAD[word] in told


def test_what_an_optimizer_does_not_take_is_told_before_data_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("--optimizer.momentun=1", "--schedule.max_lrs=1"):
        assert train(word, "--steps=1", "--data.source=model.py::raising") == 2
        assert BAD[word] in capsys.readouterr().err


NO_LENGTH = """
import torch

class Texts(torch.utils.data.Dataset):
    def __len__(self): return -1
    def __getitem__(self, index): return {}

class Lazy(Texts):
    def __len__(self): raise KeyError("rows")

def short(): return Texts(), Texts()
def lazy(): return Lazy(), Lazy()
"""


@pytest.mark.parametrize(("name", "told"), [("short", "ValueError: __len__() should"), ("lazy", "KeyError: 'rows'")])
def test_a_length_that_raises_is_the_users(
    folder: Path, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "texts.py").write_text(NO_LENGTH)
    assert train(f"--data.source=texts.py::{name}", "--steps=1") == 2
    found = capsys.readouterr().err
    assert f"error: reading the data raises {told}" in found
    assert name == "short" or "texts.py:9" in found


def test_help_teaches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "--help"], ["train", "run.toml", "--help"]):
        assert main(words) == 0
        told = capsys.readouterr().out
        assert "nnscaler train RUN.toml --ranks=2" in told
        assert "--checkpoints.keep=3\n      newest ones that stay" in told


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "taken").write_text("")
    assert train("--checkpoints.folder=taken/run") == 2
    found = capsys.readouterr()
    assert "cannot write the checkpoint taken/run" in found.err and losses(found.out) == {}


def test_a_class_makes_the_model_and_what_it_raises_is_the_users(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model=model.py::Model", "--steps=1", "--schedule.total_steps=1") == 0
    capsys.readouterr()
    assert train("--data.source=model.py::Points") == 2
    assert "Points() of model.py raises TypeError" in capsys.readouterr().err


def test_a_function_makes_the_schedule_with_the_steps_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = {"name": "model.py::down", "least": 0.3}
    fit(schedule=down, hooks={"on_step": ["model.py::tell_rate"]})
    rates = [float(text) for text in re.findall(r"rate \d (\S+)", capsys.readouterr().out)]
    assert rates == pytest.approx([0.075, 0.05, 0.03, 0.03])
    with pytest.raises(NnscalerError, match="down takes no 'lest', which") as raised:
        fit(schedule={"name": "model.py::down", "lest": 0.3})
    assert raised.value.help == "did you mean least?"
