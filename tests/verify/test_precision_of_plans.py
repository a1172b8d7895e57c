"""Mixed precision in what verify-plan verifies: by an option, by a saved plan, and of a program that has it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.ir.mixed_precision_dtypes import Precision
from tests.sampling import every
from verify import verify_plan
from verify.programs.opened_program import open_program


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)


BATCH = {"x": torch.rand(12, 6), "y": torch.arange(12) % 6}
PLAN = "dp=2,zero=1"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return nnscaler.parallelize(Model(), BATCH, ranks=2, plan=PLAN, precision="bfloat16").save(tmp_path / "program")


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks"), every(2, [(PLAN, 2), ("dp=3,zero=2", 3), ("tp=2", 2), ("dp=2,zero=3", 2)]))
def test_a_precision_that_is_asked_for_is_verified(plan: str, ranks: int) -> None:
    report = verify_plan(Model, BATCH, ranks=ranks, plan=plan, precision="bfloat16")
    assert report.verdict.passes, report.findings


@pytest.mark.long
def test_a_saved_plan_and_a_program_have_their_own(program: Path) -> None:
    for options in ({"plan": nnscaler.Plan.from_json((program / "plan.json").read_text()), "ranks": 2}, {}):
        given = options or {"program": program}
        report = verify_plan(Model, BATCH, **given)  # type: ignore[arg-type]
        assert report.verdict.passes, report.findings
    assert verify_plan(Model, BATCH, program=program, precision="bfloat16").verdict.passes
    with pytest.raises(NnscalerError, match="compiled with the precision bfloat16, and float16 is asked for"):
        verify_plan(Model, BATCH, program=program, precision="float16")


def test_the_precision_of_a_program_is_that_of_the_plan_before_an_edit(program: Path) -> None:
    """plan.json is there to be edited and compiled again, and a program does not become another one by that."""
    file = program / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4, sort_keys=True))
    assert not open_program(program).changes  # the same plan in another form
    edited = replace(nnscaler.Plan.from_json(file.read_text()), precision=None, steps=())
    file.write_text(edited.to_json())
    report = verify_plan(Model, BATCH, program=program, level="static")
    assert report.verdict.passes, report.findings
    assert any("plan.json was changed after it was written" in note for note in report.notes)
    assert "bfloat16" in open_program(program).summary
    file.unlink()
    assert open_program(program).known_plan().precision == Precision("bfloat16")


@pytest.mark.long
def test_training_compiles_for_a_short_batch_by_the_plan_before_an_edit(tmp_path: Path) -> None:
    program = nnscaler.parallelize(Model(), BATCH, ranks=2, plan="tp=2").save(tmp_path / "program")
    for change in (lambda file: file.write_text('{"mesh": [["dp", 2]], "steps": []}'), Path.unlink):
        change(program / "plan.json")
        report = verify_plan(Model, BATCH, program=program, depth="quick", train=True)
        assert report.verdict.passes, report.findings


@pytest.mark.long
@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ([(', rest={"dp": Sharded(0)}', "")], "'up.weight' is"),
        (
            [("    ranks = (0, 1)", "    ranks = (1, 0)"), ("RANKS = (0, 1)", "RANKS = (1, 0)")],
            "its stages are on the ranks",
        ),
    ],
)
def test_training_leaves_other_sizes_out_where_the_text_lays_out_otherwise(
    tmp_path: Path, edits: list[tuple[str, str]], why: str
) -> None:
    """A parameter that rests whole is as right as one in shards; the plan compiles a short batch for shards."""
    program = nnscaler.parallelize(Model(), BATCH, ranks=2, plan=PLAN).save(tmp_path / "program")
    text = (program / "role_0.py").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (program / "role_0.py").write_text(text)
    manifest = json.loads((program / "manifest.json").read_text())
    manifest["returns"]["results"][0]["ranks"] = [1, 0] if "ranks = (1, 0)" in text else [0, 1]
    (program / "manifest.json").write_text(json.dumps(manifest))
    report = verify_plan(Model, BATCH, program=program, depth="quick", train=True, train_steps=2)
    assert report.verdict.passes, report.findings
    assert any(f"compiled by the plan, and the text was edited: {why}" in note for note in report.notes)


def test_a_program_of_an_older_version_has_its_plan_in_plan_json_alone(program: Path) -> None:
    manifest = json.loads((program / "manifest.json").read_text())
    (program / "manifest.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "plan_document"}))
    assert open_program(program).known_plan().precision == Precision("bfloat16")
    (program / "plan.json").unlink()
    with pytest.raises(NnscalerError, match=r"does not say by which plan it was compiled: there is no .*plan\.json"):
        open_program(program).known_plan()


@pytest.mark.parametrize(
    ("right", "wrong", "code"),
    [
        (', master="float32"', "", "not_covered"),  # rests in bfloat16
        ("dtypes.bfloat16)", "dtypes.float16)", "operation_differs"),  # another cast
        ('"bfloat16", {}', '"float32", {}', "not_covered"),  # a leaf that is not cast
    ],
)
def test_a_program_of_another_precision_is_refuted(program: Path, right: str, wrong: str, code: str) -> None:
    for file in program.glob("role_*.py"):
        text = file.read_text()
        assert right in text
        file.write_text(text.replace(right, wrong, 1))
    report = verify_plan(Model, BATCH, program=program)
    assert not report.verdict.passes
    assert code in {finding.code for finding in report.findings}


def test_the_command_says_which_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n\ndef build_model():\n    return Scores()\n\n\n"
        "class Scores(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.layer(x).square().mean()\n\n\n"
        "def sample_inputs():\n    return {'x': torch.rand(6, 4)}\n"
    )
    common = ["verify-plan", str(file), "--backend", "simulator", "--ranks", "2", "--plan", "dp=2"]
    assert main([*common, "--precision", "bfloat16"]) == 0
    assert "(dp=2, bfloat16)" in capsys.readouterr().out
    assert main([*common, "--precision", "half"]) == 2
    assert "param is 'half'" in capsys.readouterr().err
    program = ["compile", str(file), "--ranks", "2", "--plan", "dp=2", "--out", str(tmp_path / "out")]
    assert main([*program, "--precision", "param=bfloat16,reduce=bfloat16"]) == 0
    assert "dp=2 (bfloat16, sums in bfloat16)" in capsys.readouterr().out
    assert main([*common[:4], "--program", str(tmp_path / "out")]) == 0
