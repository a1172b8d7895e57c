"""Runs of an eager model with a part in it: saved and loaded under another plan, and on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from nnscaler.training.model_part.engine import PartEngine
from nnscaler.training.model_part.module import Part
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.nnscaler.training.part.test_part import (
    CASES,
    FLOAT64,
    LENGTH,
    WIDTH,
    Around,
    assert_same,
    compiled,
    eager,
    on_ranks,
    optimizer_of,
    train,
)
from tests.sampling import every


class Both:
    """An optimizer of the part and one of what is around it, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


CHANGES = [("dp=2,zero=1", "tp=2"), ("dp=3", "pp=2"), ("tp=2", "dp=2,zero=3")]


@pytest.mark.parametrize(
    ("name", "before", "after"), every(4, [(n, *plans) for n, plans in product(("dropout", "norm", "blocks"), CHANGES)])
)
def test_a_run_goes_on_under_another_plan(name: str, before: str, after: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected, _ = eager(case, range(5))

    def work(part: Part, steps: range) -> None:
        model = Around(part, case)
        around = nn.ModuleDict({"words": model.words, "head": model.head})
        other = optimizer_of(around.parameters())
        optimizer = part.engine.optimizer(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
        run = Checkpoints(tmp_path / "run", every=3)
        run.register("around", around)
        run.register("optimizer of around", other)
        assert run.load(part.engine, optimizer) == steps.start
        found = train(part, model, Both(optimizer, other), steps)
        assert_same(found, expected[steps.start : steps.stop], part)
        run.save(steps.stop, part.engine, optimizer)
        assert part.engine.context.step == part.engine.context.passes == steps.stop

    on_ranks(before, compiled(case, before), lambda part: work(part, range(3)))
    on_ranks(after, compiled(case, after), lambda part: work(part, range(3, 5)))


def test_parts_that_draw_the_same_numbers_are_told() -> None:
    program = compiled(CASES["dropout"], "dp=1")
    first = Part(PartEngine(program, None, FLOAT64))
    with pytest.warns(UserWarning, match="two parts draw the same random numbers, as in `dropout`: both have seed 0"):
        Part(PartEngine(program, None, FLOAT64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Part(PartEngine(program, None, replace(FLOAT64, seed=1)))
    x = torch.randn(12, LENGTH, WIDTH, dtype=torch.float64)
    assert not torch.equal(first(x), other(x))


SCRIPT = """
import torch

import nnscaler
from tests.nnscaler.training.part.test_part import CASES, Around, assert_same, eager, made, optimizer_of, train

for name, plan in (("dropout", "dp=2,zero=3"), ("blocks", "pp=2")):
    case = CASES[name]
    body = made(case)
    sample = case.sample(12)
    part = nnscaler.parallelize_part(body, sample, plan=plan, settings={"dtype": "float64", "device": "cpu"})
    model = Around(part, case)
    found = train(part, model, optimizer_of(model.parameters()), range(3))
    assert_same(found, eager(case, range(3))[0], part)
    if part.engine.rank == 0:
        print(name, "on", part.engine.world_size, "ranks is the same")
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_real_ranks_train_as_the_eager_model(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["dropout on 2 ranks is the same", "blocks on 2 ranks is the same"]
