"""The example that learns pictures: it steps and evaluates, under a plan that cuts windows as on one rank."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import nnscaler
from nnscaler.cli.main import main
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.training.engine import Engine
from tests.nnscaler.training.test_engine import on_ranks


@pytest.fixture(scope="module")
def swin(examples: Path) -> ModuleType:
    return load_user_module(str(examples / "swin_train.py"))


def test_pictures_are_of_their_numbers(swin: ModuleType) -> None:
    seen, kept = swin.datasets()
    assert {int(seen[i]["labels"]) for i in range(40)} == set(range(len(swin.SHAPES)))
    assert torch.equal(seen[7]["pixel_values"], swin.Pictures(3, 9)[4]["pixel_values"])
    assert not torch.equal(seen[0]["pixel_values"], kept[0]["pixel_values"])


@pytest.mark.long
def test_two_plans_take_the_same_steps(swin: ModuleType) -> None:
    """Both modes, each with a batch of its own size: stochastic depth is an operator that evaluation has not."""
    pictures, _ = swin.datasets()
    batches = [torch.utils.data.default_collate([pictures[i] for i in range(rows)]) for rows in (4, 3)]

    def curve(engine: Engine) -> list[float]:
        optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
        losses = []
        for _ in range(2):
            losses += [float(engine.step(batches[0])), float(engine.evaluate(batches[1]))]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    found = []
    for ranks, plan in ((1, "dp=1"), (2, "tp=2")):
        torch.manual_seed(0)
        program = nnscaler.parallelize(swin.build_model(), batches[0], ranks=ranks, plan=plan)
        found += on_ranks(program, curve)
    assert found[1:] == [pytest.approx(found[0], rel=1e-10)] * 2
    assert len(set(found[0])) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_learns(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(examples / "swin.toml"), "--loggers.every=250"]) == 0
    [*_, last] = re.findall(r"validation loss (\S+)", capsys.readouterr().out)
    assert float(last) < 0.3, "as the file says"
