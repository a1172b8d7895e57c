"""A program is for one size of the batch: another one is refused, for it would give another loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.program_directory import ProgramDirectory, read_program
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), y)


def losses(program: ProgramDirectory, batch: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> list[float]:
    def step(communicator: object) -> float:
        rank = communicator.rank  # type: ignore[attr-defined]
        made = RankExecutor(program.role(rank), rank, communicator, program.state(), ExecutorSettings(shapes=shapes))  # type: ignore[arg-type]
        loss = made.step(batch)
        assert loss is not None
        return loss.item()

    return Simulator(2).run(step)


def test_a_batch_of_another_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    small, large = ({"x": torch.randn(n, 4), "y": torch.randn(n, 3)} for n in (8, 12))
    program = read_program(nnscaler.parallelize(model, small, ranks=2, plan="dp=2").save(tmp_path / "program"))
    right = model(**small).item()
    assert losses(program, small, program.manifest.shapes) == pytest.approx([right, right], rel=1e-6)
    with pytest.raises(Exception, match=r"input 'x' has shape \(12, 4\), and the program is for \(8, 4\)"):
        losses(program, large, program.manifest.shapes)
    # what the check prevents: the mean is taken over the entries of the batch that was compiled
    assert losses(program, large, {})[0] == pytest.approx(model(**large).item() * 12 / 8, rel=1e-6)
