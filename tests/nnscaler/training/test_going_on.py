"""When a schedule goes on, what a run that goes on has from its checkpoint, and how a run ends before its time."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nnscaler.errors import NnscalerError
from nnscaler.training.saving.checkpoints import Checkpoints
from nnscaler.training.trainer import Result, Trainer


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Root(torch.nn.Module):
    """A loss that is finite, and whose gradient is not where a row is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum(1).sqrt().mean()


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows_of(self.rows))


def rows_of(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator)} for _ in range(count)]


def fit(data: Any = None, module: torch.nn.Module | None = None, **more: Any) -> tuple[Trainer, Result]:
    fields = {"optimizer": {"name": "SGD", "lr": 0.1}, "data": {"batch_size": 4, "shuffle": False}, "steps": 8, **more}
    trainer = Trainer(module=module or Model(), datasets=rows_of(10) if data is None else data, **fields)
    return trainer, trainer.fit()


class Rates:
    """A hook that keeps the rate of each step."""

    def __init__(self) -> None:
        self.of_next: list[float] = []

    def __call__(self, trainer: Trainer) -> None:
        self.of_next.append(trainer.optimizer.param_groups[0]["lr"])


class Average:
    """An average of the parameters, as hooks keep one."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def start(self, trainer: Trainer) -> None:
        self.mean = {name: p.detach().clone() for name, p in trainer.engine.parameters.items()}
        assert trainer.checkpoints is not None
        trainer.checkpoints.register("average", self)

    def step(self, trainer: Trainer) -> None:
        for name, parameter in trainer.engine.parameters.items():
            self.mean[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.mean)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = dict(state)


def test_what_a_hook_registers_goes_on_too(tmp_path: Path) -> None:
    """`on_start` is called when the checkpoint has been loaded."""

    def average(folder: Path, *ends: int) -> dict[str, Tensor]:
        for steps in ends:
            kept = Average()
            hooks = {"on_start": [kept.start], "on_step": [kept.step]}
            fit(hooks=hooks, steps=steps, checkpoints={"folder": str(folder)})
        return kept.mean

    whole, parts = average(tmp_path / "whole", 8), average(tmp_path / "parts", 3, 8)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_schedule_of_epochs_goes_on_after_the_last_batch_of_one(stream: bool, accumulation: int) -> None:
    """As a loop does that ends each epoch with `schedule.step()`: ten rows are three batches, the last one short."""
    rates = Rates()
    schedule = {"name": "StepLR", "step_size": 1, "gamma": 0.5, "per": "epoch"}
    steps = 8 // accumulation
    fit(
        Stream(10) if stream else rows_of(10),
        schedule=schedule,
        hooks={"on_step": [rates]},
        steps=steps,
        accumulation=accumulation,
    )
    batches = [accumulation * (step + 1) for step in range(steps)]
    assert rates.of_next == [0.1 * 0.5 ** (done // 3) for done in batches]


@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_counts_once_where_a_run_goes_on_at_its_end(tmp_path: Path, stream: bool) -> None:
    rates = Rates()
    schedule = {"name": "StepLR", "step_size": 1, "gamma": 0.5, "per": "epoch"}
    for steps in (3, 6, 8):
        data = Stream(10) if stream else rows_of(10)
        hooks = {"on_step": [rates]}
        fit(data, schedule=schedule, hooks=hooks, steps=steps, checkpoints={"folder": str(tmp_path), "every": 1})
    assert rates.of_next == [0.1 * 0.5 ** (done // 3) for done in range(1, 9)]


@pytest.mark.parametrize(("per", "wanted"), [("epoch", 3), ("step", 8)])
def test_a_schedule_is_as_long_as_the_run_in_its_own_unit(per: str, wanted: int) -> None:
    trainer, _ = fit(schedule={"name": "CosineAnnealingLR", "per": per})
    assert trainer.schedule.T_max == wanted


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_not_used(tmp_path: Path, clip: float) -> None:
    rows = rows_of(8)
    rows[5] = {"x": torch.zeros(4)}
    checkpoints = {"folder": str(tmp_path), "every": 1}
    trainer, result = fit(rows, Root(), clip=clip, checkpoints=checkpoints)
    assert (result.ended, result.steps) == ("not finite", 2)
    assert math.isfinite(trainer.loss)
    assert all(bool(p.isfinite().all()) for p in trainer.engine.parameters.values())
    assert trainer.checkpoints is not None and trainer.checkpoints.steps() == [1]


def test_settings_that_a_checkpoint_overrides_are_told(tmp_path: Path) -> None:
    checkpoints = {"folder": str(tmp_path)}
    cosine = {"name": "CosineAnnealingLR"}
    told: list[str] = []
    fit(checkpoints=checkpoints, schedule=cosine, warn=told.append)
    assert told == []
    optimizer = {"name": "SGD", "lr": 0.3, "weight_decay": 0.1}
    fit(checkpoints=checkpoints, schedule=cosine, steps=12, optimizer=optimizer, warn=told.append)
    assert sorted(told) == [
        "T_max stays 8, as in the checkpoint, where [schedule] makes it 12",
        "lr stays 0.1, as in the checkpoint, where [optimizer] says 0.3",
        "weight_decay stays 0, as in the checkpoint, where [optimizer] says 0.1",
    ]
    with pytest.raises(NnscalerError, match="the state of another schedule than StepLR, with T_max, eta_min") as raised:
        fit(checkpoints=checkpoints, schedule={"name": "StepLR", "step_size": 2}, steps=13)
    assert raised.value.code == "other_schedule"


def test_a_score_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    scores = itertools.chain([math.nan, 2.0, 1.0, math.nan])

    def score(trainer: Trainer) -> None:
        assert trainer.checkpoints is not None
        trainer.checkpoints.score(next(scores))

    fit(steps=4, checkpoints={"folder": str(tmp_path), "every": 1, "keep": 0}, hooks={"on_step": [score]})
    assert (tmp_path / "best").readlink() == Path("step_000003")
    assert Checkpoints(tmp_path).steps() == [1, 2, 3, 4]


def test_a_score_is_that_of_the_checkpoints_own_step(tmp_path: Path) -> None:
    """The best validation is that of step 2, which is not saved."""
    losses = iter([1.0, 3.0, 2.0])

    def score(trainer: Trainer) -> None:
        assert trainer.checkpoints is not None
        trainer.checkpoints.score(next(losses))

    more = {"hooks": {"on_validation": [score]}, "validation": {"every": 2}}
    fit((rows_of(10), rows_of(4)), steps=6, checkpoints={"folder": str(tmp_path), "every": 3, "keep": 0}, **more)
    assert Checkpoints(tmp_path).steps() == [3, 6]
    assert (tmp_path / "best").readlink() == Path("step_000006")


def test_a_run_that_is_asked_to_stop_ends_after_the_step_and_saves(tmp_path: Path) -> None:
    def ask(trainer: Trainer) -> None:
        if trainer.step == 2:
            trainer.ask_to_stop()

    trainer, result = fit(checkpoints={"folder": str(tmp_path)}, hooks={"on_step": [ask]})
    assert (result.ended, result.steps) == ("interrupted", 3)  # ranks agree on it in the next step
    assert trainer.checkpoints is not None and trainer.checkpoints.steps() == [3]


@pytest.mark.parametrize("more", [{"data": {"batch_size": 8, "shuffle": True}}, {"accumulation": 3}, {"epochs": 4}])
def test_epochs_end_where_they_end_in_a_run_that_goes_on_with_other_sizes(tmp_path: Path, more: dict[str, Any]) -> None:
    def run(**fields: Any) -> tuple[Trainer, Result]:
        fields = {"optimizer": {"name": "SGD", "lr": 0.1}, "data": {"batch_size": 4, "shuffle": True}, **fields}
        made = Trainer(module=Model(), datasets=rows_of(30), checkpoints={"folder": str(tmp_path)}, **fields)
        return made, made.fit()

    run(steps=5)
    asked = {"epochs": 3, **more}
    trainer, result = run(**asked)
    assert (result.ended, trainer.loader.completed) == ("finished", asked["epochs"])
    assert run(**asked)[1].steps == result.steps  # nothing is left


@pytest.mark.parametrize("rows", [rows_of(26), Stream(26)])
def test_a_run_ends_with_a_validation_and_a_checkpoint_that_has_its_score(tmp_path: Path, rows: Any) -> None:
    at: list[tuple[int, str]] = []
    hooks = {p: [lambda t, p=p: at.append((t.step, p))] for p in ("on_validation", "on_checkpoint")}
    kept = {"folder": str(tmp_path), "every": 7}
    _, result = fit((rows, rows_of(4)), steps=0, epochs=1, validation={"every": 5}, checkpoints=kept, hooks=hooks)
    assert result.steps == 7
    assert at == [(5, "on_validation"), (7, "on_validation"), (7, "on_checkpoint")]


@pytest.mark.parametrize("point", ["on_step", "on_validation", "on_checkpoint"])
def test_a_hook_stops_a_run_after_its_step(tmp_path: Path, point: str) -> None:
    hooks = {point: [lambda trainer: trainer.stop() if trainer.step == 4 else None]}
    kept = {"folder": str(tmp_path), "every": 2}
    data = (rows_of(10), rows_of(4))
    trainer, result = fit(data, validation={"every": 4}, checkpoints=kept, hooks=hooks)
    assert (result.ended, result.steps) == ("stopped", 4)
    assert trainer.checkpoints is not None and trainer.checkpoints.steps() == [2, 4]


def test_an_interruption_changes_no_schedule_that_counts_validations(tmp_path: Path) -> None:
    plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 0.5}

    def rates(folder: str, **more: Any) -> list[float]:
        rate = Rates()
        more = {"hooks": {"on_step": [rate]}, **more}
        data = (rows_of(10), rows_of(4))
        fit(data, schedule=plateau, validation={"every": 4}, checkpoints={"folder": str(tmp_path / folder)}, **more)
        return rate.of_next

    whole = rates("whole", steps=12)
    first = Rates()
    ask = [first, lambda trainer: trainer.step == 5 and trainer.ask_to_stop()]
    rates("parts", steps=12, hooks={"on_step": ask})
    assert [*first.of_next, *rates("parts", steps=12)] == whole and len(set(whole)) > 1


def test_a_validation_that_raises_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that goes on makes it, and is the one that nothing stopped."""

    def run(folder: str, **more: Any) -> tuple[Trainer, list[float]]:
        rate = Rates()
        hooks = {name: [rate, *more.get(name, [])] if name == "on_step" else more[name] for name in {"on_step", *more}}
        schedule = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 0.5}
        kept = {"folder": str(tmp_path / folder), "every": 2, "keep": 9}
        data = (rows_of(10), rows_of(4))
        return fit(data, schedule=schedule, validation={"every": 2}, checkpoints=kept, hooks=hooks)[0], rate.of_next

    def fail(trainer: Trainer) -> None:
        if trainer.step == 2:
            raise KeyError("no such metric")

    whole, rates = run("whole")
    with pytest.raises(KeyError, match="no such metric"):
        run("parts", on_validation=[fail])
    assert Checkpoints(tmp_path / "parts").steps() == [2]
    at: list[tuple[int, str]] = []
    told = {point: [lambda t, p=point: at.append((t.step, p))] for point in ("on_validation", "on_checkpoint")}
    written: list[int] = []
    write = Checkpoints._write
    monkeypatch.setattr(
        Checkpoints, "_write", lambda own, *parts: (written.append(own._saving.step), write(own, *parts))
    )
    parts, rest = run("parts", **told)
    assert written == [2, 4, 6, 8]  # each once
    both = ("on_validation", "on_checkpoint")
    assert at == [(step, point) for step in (2, 4, 6, 8) for point in both]
    assert rest == rates[2:] and len({*rates}) > 1
    torch.testing.assert_close(parts.engine.state_dict(), whole.engine.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "parts" / "best").readlink() == (tmp_path / "whole" / "best").readlink()
    assert run("parts", **told)[1] == [] and len(at) == 8  # what was validated is not again


SLOW = """
import time, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x).square().mean()
def build_model(): return Model()
def datasets(): return [{"x": torch.randn(4)} for _ in range(64)]
def wait(trainer): time.sleep(0.1)
"""


@pytest.mark.parametrize("plan", [pytest.param("dp=1", marks=pytest.mark.long), "dp=2"])
def test_ctrl_c_ends_a_run_after_its_step(tmp_path: Path, plan: str) -> None:
    (tmp_path / "model.py").write_text(SLOW)
    (tmp_path / "run.toml").write_text(
        f'model = "model.py"\nplan = "{plan}"\nsteps = 1000\n[data]\nsource = "model.py::datasets"\nbatch_size = 4\n'
        '[hooks]\non_step = ["model.py::wait"]\n[checkpoints]\nfolder = "runs"\n'
    )
    command = [sys.executable, "-m", "nnscaler", "train", "run.toml"]
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    running = subprocess.Popen(
        command, cwd=tmp_path, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step 2 "):
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    last = [int(line.split()[1]) for line in out.splitlines() if line.startswith("step ")][-1]
    assert running.returncode == 130, err
    assert Checkpoints(tmp_path / "runs").steps() == [last]
    assert f"interrupted  after step {last}; checkpoints are in runs" in err
