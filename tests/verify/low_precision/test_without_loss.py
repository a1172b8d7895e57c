"""Programs that only run forward: what they return is compared, for nothing else of them changes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import verify
from nnscaler.compile import parallelize
from verify.results.report import Report
from verify.results.verdict import Verdict

BATCH = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.norm(self.inner(x))))


class Chosen(Scores):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def judged(model: nn.Module, program: Path) -> Report:
    return verify.verify_plan(model, BATCH, program=str(program), level="run", backend="simulator", dtype="bfloat16")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that there is no loss
        return parallelize(Scores(), BATCH, ranks=2, plan="dp=2").save(tmp_path_factory.mktemp("scores"))


def test_a_right_one_passes_by_its_results(program: Path) -> None:
    report = judged(Scores(), program)
    checks = {check.name: check for check in report.checks}
    assert report.verdict.passes, report.to_json()
    assert checks["results in bfloat16"].count == 1 and checks["buffers in bfloat16"].count == 3


def test_a_wrong_one_is_refuted(program: Path, tmp_path: Path) -> None:
    for file in program.iterdir():
        text = file.read_bytes()
        (tmp_path / file.name).write_bytes(text.replace(b"aten.relu(", b"aten.neg(") if file.suffix == ".py" else text)
    found = [f for f in judged(Scores(), tmp_path).findings if f.code == "result_differs"]
    assert found and "in bfloat16, the result `output` is" in found[0].message


def test_numbers_that_are_not_compared_pass_nothing() -> None:
    report = verify.verify_plan(
        Chosen(), BATCH, ranks=2, plan="dp=2", level="run", backend="simulator", dtype="bfloat16"
    )
    assert report.verdict is Verdict.INCONCLUSIVE
    assert [f.code for f in report.findings] == ["nothing_checked"]
