"""Programs that run in another mode, train or evaluation, than their model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
import verify
from tests.broken.planting import Edit, plant
from tests.sampling import every
from verify.programs.request import Level

CHANNELS = 6


class Backbone(nn.Module):
    """A batch norm whose statistics may be frozen, and a head that drops; whatever is not said trains."""

    def __init__(self, *, norm: bool = True, drop: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS).train(norm)
        self.drop = nn.Dropout(0.4).train(drop)
        self.second = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.drop(F.gelu(self.norm(self.first(x))))), labels)


def training() -> nn.Module:
    torch.manual_seed(0)
    return Backbone()


def frozen_norm() -> nn.Module:
    torch.manual_seed(0)
    return Backbone(norm=False)


def without_dropout() -> nn.Module:
    torch.manual_seed(0)
    return Backbone(drop=False)


def evaluating() -> nn.Module:
    return training().eval()


MODES = (training, frozen_norm, without_dropout, evaluating)
Factory = Callable[[], nn.Module]


def batch(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 5, generator=generator), "labels": torch.randint(0, 3, (rows,), generator=generator)}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[Factory, Path]:
    """A program for each mode."""
    return {
        made: nnscaler.parallelize(made(), batch(), ranks=2, plan="dp=2").save(tmp_path_factory.mktemp(made.__name__))
        for made in MODES
    }


@pytest.mark.parametrize("factory", every(2, MODES))
@pytest.mark.parametrize(("ranks", "plan", "seed"), every(2, [(3, "dp=3", 0), (4, "dp=2,tp=2", 1)]))
def test_the_program_is_in_the_mode_of_its_model(factory: Factory, ranks: int, plan: str, seed: int) -> None:
    """At every level; the seed moves the running statistics too."""
    report = verify.verify_plan(factory(), batch(), ranks=ranks, plan=plan, seed=seed)
    assert report.exit_code == 0 and not report.findings, report.to_json()
    assert len([note for note in report.notes if "evaluation mode" in note]) == (factory is evaluating)
    assert not any("evaluation" in check.name for check in report.checks)


def test_micro_batches_of_frozen_statistics() -> None:
    """Batch norm couples micro-batches only while it takes the statistics of the batch."""
    report = verify.verify_plan(frozen_norm(), batch(), ranks=2, plan="dp=2", micro_batches=3)
    assert report.exit_code == 0, report.to_json()


@pytest.mark.parametrize("factory", [frozen_norm, evaluating])
def test_low_precision_is_in_the_mode_of_the_model(factory: Factory) -> None:
    report = verify.verify_plan(factory(), batch(), ranks=2, plan="dp=2", dtype=torch.bfloat16, level="run")
    assert report.exit_code == 0, report.to_json()


@pytest.mark.parametrize(("meant", "made", "level"), every(5, product(MODES, MODES, ["static", "run"])))
def test_a_program_of_another_mode(made: Factory, meant: Factory, level: Level, programs: dict[Factory, Path]) -> None:
    report = verify.verify_plan(meant, batch(), ranks=2, program=programs[made], level=level, depth="quick")
    assert report.exit_code == (0 if made is meant else 1), report.to_json()


@pytest.mark.parametrize("tensor", ["norm_running_mean", "norm_running_var"])
def test_statistics_of_nobody(tensor: str, programs: dict[Factory, Path], tmp_path: Path) -> None:
    """Fresh statistics are zeros and ones: a program that leaves them out must be seen all the same."""
    program = Path(shutil.copytree(programs[evaluating], tmp_path / "program"))
    instead = f"{tensor} * {0 if tensor.endswith('mean') else '0 + 1'}"
    for role in range(len(list(program.glob("role_*.py")))):
        line = next(t for t in (program / f"role_{role}.py").read_text().splitlines() if "aten.batch_norm(" in t)
        assert f"self.{tensor}" in line
        plant(program / f"role_{role}.py", Edit(f"self.{tensor}", f"(self.{instead})", line="aten.batch_norm("))
    report = verify.verify_plan(evaluating, batch(), ranks=2, program=program, level="run", depth="quick")
    assert report.exit_code == 1, report.to_json()
