"""A program that was compiled before, verified from Python and from elsewhere: its loss and its operators' files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.runtime.program.user_operators import locate
from verify import Report, verify_plan

OPERATORS = """
import nnscaler, torch

@nnscaler.register_op("n d -> n d", name="program_folder_NAME")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0
"""
MODEL = """
import torch
from operators_NAME import twice


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x):
        return twice(self.layer(x))


def loss(outputs, batch):
    return torch.nn.functional.cross_entropy(outputs, batch["labels"])


def build_model():
    return Scores()


def sample_inputs():
    return {"x": torch.randn(8, 6), "labels": torch.randint(0, 4, (8,))}
"""


@dataclass(frozen=True)
class Project:
    """`model` and `operators`: files; `program`: the folder of the program."""

    model: Path
    operators: Path
    program: Path

    def verify(self, **options: Any) -> Report:
        module = load_user_module(str(self.model))
        return verify_plan(module.build_model, module.sample_inputs(), program=self.program, level="static", **options)


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Compiled with a loss of its own; the current folder is elsewhere."""
    name = re.sub(r"\W", "_", request.node.name)  # operators are registered once per process
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"operators_{name}.py").write_text(OPERATORS.replace("NAME", name))
    target = f"model_{name}.py"
    (folder / target).write_text(MODEL.replace("NAME", name))
    monkeypatch.chdir(folder)
    assert main(["compile", target, "--plan", "dp=2", "--loss-fn", f"{target}::loss", "--out", "program"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return Project(folder / target, folder / f"operators_{name}.py", folder / "program")


@pytest.mark.long
def test_the_program_knows_its_loss_and_its_ranks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    report = project.verify()
    assert report.exit_code == 0, report.to_json()
    assert report.setting == "on 2 ranks (dp=2)"
    capsys.readouterr()
    assert main(["verify-plan", str(project.model), "--program", str(project.program), "--level", "static"]) == 0
    manifest = json.loads((project.program / "manifest.json").read_text())
    assert manifest["model"]["loss"] == f"{project.model}::loss"
    assert project.verify(loss_fn=lambda outputs, batch: outputs.square().mean()).exit_code == 1


def test_a_loss_that_is_gone_is_an_error(project: Project) -> None:
    file = project.program / "manifest.json"
    manifest = json.loads(file.read_text())
    for origin, message in (
        (f"{project.program}/gone.py::loss", "which is in no file"),
        ("<lambda>", "which is in no file"),
        (f"{project.model}::gone", "the file has no gone any more"),
    ):
        manifest["model"]["loss"] = origin
        file.write_text(json.dumps(manifest))
        with pytest.raises(NnscalerError) as caught:
            project.verify()
        assert caught.value.code == "no_such_file"
        assert message in caught.value.message and repr(origin) in caught.value.message
        assert "--loss-fn" in (caught.value.help or "")


def test_a_plan_without_ranks_and_program_is_an_error() -> None:
    with pytest.raises(NnscalerError, match="needs a number of ranks, or a program"):
        verify_plan(torch.nn.Linear(2, 2), {})


@pytest.mark.long
def test_a_changed_operator_file_is_named(project: Project) -> None:
    assert project.verify().exit_code == 0
    project.operators.write_text(project.operators.read_text().replace("x * 2.0", "x * 3.0"))
    report = project.verify()
    assert report.exit_code == 1
    assert report.findings[0].code == "record_differs"
    message = f"{project.operators}, from which operators come, was changed after the program was compiled"
    assert message in report.findings[0].message


@pytest.mark.parametrize("how", ["no_record", "no_hash"])
def test_an_operator_file_without_a_record_is_named(project: Project, how: str) -> None:
    """Its hash would not be compared with the file as it is now."""
    file = project.program / "manifest.json"
    manifest = json.loads(file.read_text())
    if how == "no_hash":
        manifest["operator_files"][project.operators.name]["sha256"] = None
    else:
        del manifest["operator_files"][project.operators.name]
    file.write_text(json.dumps(manifest))
    report = project.verify()
    assert report.exit_code == 1
    (found,) = (f for f in report.findings if f.code == "record_differs")
    assert f"manifest.json has no hash of {project.operators.name}, from which operators come" in found.message
    with pytest.raises(ProgramError, match=f"has no hash of {project.operators.name}, from which operators come"):
        locate(project.operators.name, project.program)


def test_operators_are_found_from_the_program_s_record(project: Project, tmp_path: Path) -> None:
    name, text = project.operators.name, project.operators.read_text()
    assert locate(name, project.program) == project.operators
    moved = tmp_path / "moved"
    shutil.copytree(project.program.parent, moved)
    shutil.rmtree(project.program.parent)
    assert locate(name, moved / "program") == moved / name  # both were moved together
    Path(name).write_text("raise SystemExit('another file of this name')")  # in the current folder
    assert locate(name, moved / "program") == moved / name
    (moved / name).write_text(text + "\n")
    with pytest.raises(ProgramError, match=f"moved/{name}, from which operators come, was changed"):
        locate(name, moved / "program")
    (moved / name).unlink()
    Path(name).unlink()
    assert locate(name, moved / "program") is None


NARROW = """
class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        h = x.float()
        return (weight.float() * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        h, g = x.float(), g.float()
        scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        h, inner = h * scale, g * weight.float()
        back = scale * (inner - h * (h * inner).mean(-1, keepdim=True))
        return back.to(x.dtype), (g * h).sum(0).to(weight.dtype)


@nnscaler.register_op("n d^, d^ -> n d^", name="program_folder_narrow")
def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Norm.apply(x, weight)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.weight = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return norm(self.layer(x), self.weight).sin().sum()


def build_model():
    return Model()


def sample_inputs():
    return {"x": torch.randn(8, 6)}
"""


def test_an_operator_may_compute_in_a_narrower_dtype(tmp_path: Path) -> None:
    """Most norms do; the run in float64 has none of its rounding."""
    file = tmp_path / "narrow_norm.py"
    file.write_text("import nnscaler, torch\n" + NARROW)
    module = load_user_module(file)
    report = verify_plan(module.build_model, module.sample_inputs(), ranks=2, plan="dp=2")
    assert report.verdict.passes, report
