"""Programs without the autocast of their model, which names another device than the one that they are verified on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
import verify
from tests.broken.planting import Edit, plant

REGION = "with torch.autocast(self.device.type, dtypes.bfloat16):"


class Mixed(nn.Module):
    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.enabled = nn.Linear(5, 8), nn.Linear(8, 3), enabled

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.enabled):
            y = F.gelu(self.up(x))
        return F.cross_entropy(self.down(y.float()), labels)


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Mixed(False)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(12, 5, generator=generator), "labels": torch.randint(0, 3, (12,), generator=generator)}


@pytest.mark.parametrize(("ranks", "plan"), [(3, "dp=3"), (2, "tp=2")])
def test_the_region_is_in_the_program_and_the_verdict_says_what_it_is_about(
    ranks: int, plan: str, tmp_path: Path
) -> None:
    report = verify.verify_plan(mixed(), batch(), ranks=ranks, plan=plan)
    assert report.exit_code == 0, report.to_json()
    assert report.setting.endswith("), in float64")
    (precision,) = (note for note in report.notes if "under autocast" in note)
    assert precision.startswith("the program computes 2 operations under autocast to bfloat16, first at ")
    assert precision.endswith("shows nothing of that; that the model does the same was compared in its text")
    assert any('torch.autocast("cuda", bfloat16) is kept' in note for note in report.notes)
    program = nnscaler.parallelize(mixed(), batch(), ranks=ranks, plan=plan).save(tmp_path / "program")
    assert (program / "role_0.py").read_text().count(REGION) >= 1


def test_what_runs_it_or_reads_it_alone_says_so() -> None:
    ran = verify.verify_plan(mixed(), batch(), ranks=2, plan="dp=2", level="run")
    assert ran.exit_code == 0 and any(note.endswith("the model does the same was not compared") for note in ran.notes)
    read = verify.verify_plan(mixed(), batch(), ranks=2, plan="dp=2", level="static")
    assert read.exit_code == 0 and "float64" not in read.setting
    low = verify.verify_plan(mixed(), batch(), ranks=2, plan="dp=2", level="run", dtype=torch.bfloat16)
    assert low.exit_code == 0 and low.setting.endswith(", in bfloat16"), low.to_json()
    half = verify.verify_plan(plain().bfloat16(), batch(), ranks=2, plan="dp=2", level="run")
    assert "the program's own dtype is bfloat16: `--dtype bfloat16` runs it in that" in half.notes


def test_a_program_without_the_region(tmp_path: Path) -> None:
    lost = nnscaler.parallelize(plain(), batch(), ranks=2, plan="dp=2").save(tmp_path / "lost")
    report = verify.verify_plan(mixed, batch(), ranks=2, program=lost, level="static")
    assert report.exit_code == 1, report.to_json()
    added = nnscaler.parallelize(mixed(), batch(), ranks=2, plan="dp=2").save(tmp_path / "added")
    report = verify.verify_plan(plain, batch(), ranks=2, program=added, level="static")
    assert report.exit_code == 1, report.to_json()


def test_a_region_that_is_edited(tmp_path: Path) -> None:
    program = nnscaler.parallelize(mixed(), batch(), ranks=2, plan="dp=2").save(tmp_path)
    for role in program.glob("role_*.py"):
        plant(role, Edit("dtypes.bfloat16):", "dtypes.float16):", line="torch.autocast("))
    report = verify.verify_plan(mixed, batch(), ranks=2, program=program, level="static")
    assert report.exit_code == 1, report.to_json()
    assert any("autocast" in finding.message for finding in report.findings), report.to_json()


LINEAR = "            linear = aten.linear(x, self.up_weight, self.up_bias)"
GELU = "            gelu = aten.gelu(linear)"
BACK = "to = aten.to.dtype(gelu, dtypes.float32)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nnscaler.parallelize(mixed(), batch(), ranks=2, plan="dp=2").save(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize(
    ("old", "new", "code", "cause"),
    [
        pytest.param(
            f"        {REGION}\n{LINEAR}",
            f"{LINEAR[4:]}  #\n        {REGION}",
            "autocast_differs",
            "its result is float32 here, and bfloat16 in the model; only the text shows it",
            id="left out",
        ),
        pytest.param(
            "        linear_1 = aten",
            f"        {REGION}\n            linear_1 = aten",
            "autocast_differs",
            "its result is bfloat16 here, and float32 in the model; only the text shows it",
            id="too much",
        ),
        pytest.param(BACK, "to = gelu", "rank_raises", "", id="no cast back: two dtypes in one product"),
        pytest.param(BACK, "to = aten.to.dtype(gelu, dtypes.float64)", "rank_raises", "", id="too wide a cast"),
        pytest.param(
            "        with torch.no_grad():\n            cross_entropy_loss_max",
            "        linear_1 = aten.to.dtype(aten.to.dtype(linear_1, dtypes.bfloat16), dtypes.float32)\n"
            "        with torch.no_grad():\n            cross_entropy_loss_max",
            "precision_lost",
            "a cast to bfloat16 that the model does not have",
            id="logits, which a line without gradients reads too",
        ),
    ],
)
def test_what_a_run_in_float64_cannot_show_is_refuted_nevertheless(
    old: str, new: str, code: str, cause: str, compiled: Path, tmp_path: Path
) -> None:
    program = shutil.copytree(compiled, tmp_path / "program")
    plant(program / "role_0.py", Edit(old, new))
    report = verify.verify_plan(mixed, batch(), program=program, depth="quick")
    assert report.exit_code == 1, report.to_json()
    assert any(f.code == code and (f.cause or "").startswith(cause) for f in report.findings), report.to_json()


def test_a_region_around_what_autocast_does_not_cast_is_not_refuted(compiled: Path, tmp_path: Path) -> None:
    """`gelu` is computed in the dtype of its operand, inside or outside."""
    program = shutil.copytree(compiled, tmp_path / "program")
    plant(program / "role_0.py", Edit(GELU, GELU[4:]))
    report = verify.verify_plan(mixed, batch(), program=program, depth="quick")
    assert report.exit_code == 3, report.to_json()
    assert [f.cause for f in report.findings] == ["the region around it differs"]
