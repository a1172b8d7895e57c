"""The state of an optimizer in a checkpoint: what is read back, by which class, in which dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nnscaler.errors import NnscalerError
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.nnscaler.training.saving.test_checkpoints import Numbers, engine_of
from tests.nnscaler.training.test_engine import Model, batch, compiled


def test_another_optimizer(tmp_path: Path) -> None:
    engine, run = engine_of(), Checkpoints(tmp_path, every=1)

    def made(kind: Callable[..., Any], split: bool, *rates: float) -> torch.optim.Optimizer:
        values = list(engine.parameters.values())
        groups = [{"params": values[:2], "lr": rates[0]}, {"params": values[2:], "lr": rates[-1]}]
        return kind(groups if split else values, lr=rates[0])

    run.save(1, engine)
    with pytest.raises(NnscalerError, match="was saved without an optimizer"):
        run.load(engine, made(torch.optim.SGD, True, 0.1))
    run.save(2, engine, made(torch.optim.SGD, True, 0.1, 0.2))
    with pytest.raises(NnscalerError, match="has the state of SGD, and this is AdamW"):
        run.load(engine, made(torch.optim.AdamW, True, 0.1))
    with pytest.raises(NnscalerError, match="are in one group, and were in two with different lr"):
        run.load(engine, made(torch.optim.SGD, False, 0.1))
    read = made(torch.optim.SGD, True, 0.5, 0.7)
    assert run.load(engine, read) == 2 and [g["lr"] for g in read.param_groups] == [0.1, 0.2]
    with pytest.raises(NnscalerError, match="saved without the state of the scheduler"):
        run.load(engine, read, Numbers())
    with pytest.raises(NnscalerError, match="a parameter of shape"):
        run.save(3, engine, torch.optim.SGD([nn.Parameter(torch.ones(3))]))


def test_what_belongs_to_no_parameter_goes_on_too(tmp_path: Path) -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.state["count"] = self.state.get("count", 0) + 1
            super().step()

    engine, run = engine_of(), Checkpoints(tmp_path, every=1)
    optimizers = [engine.optimizer(Counts, lr=0.1) for _ in range(2)]
    optimizers[0].step()
    run.save(1, engine, optimizers[0])
    run.load(engine, optimizers[1])
    assert optimizers[1].state["count"] == 1


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")])
def test_a_run_goes_on_in_another_dtype(tmp_path: Path, dtypes: tuple[str, str]) -> None:
    """As torch's optimizers do, what had the dtype of a parameter follows it."""

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, *given: Any, **named: Any) -> Any:
            return super().forward(*given, **named) * self.scale

    for dtype in dtypes:
        engine, run = Engine(compiled(Scaled(), "dp=1", 1), None, EngineSettings(dtype=dtype)), Checkpoints(tmp_path, 1)
        optimizer = engine.optimizer(torch.optim.AdamW, lr=0.1)
        run.load(engine, optimizer)
        engine.step({n: t.to(getattr(torch, dtype)) if n == "x" else t for n, t in batch(4).items()})
        optimizer.step()
        run.save(1, engine, optimizer)
    kinds = {(name, value.dtype) for value in optimizer.state.values() for name, value in value.items()}
    assert kinds == {("step", torch.float32), *((n, getattr(torch, dtypes[1])) for n in ("exp_avg", "exp_avg_sq"))}
