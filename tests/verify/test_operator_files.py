"""What is verified is what the program's folder would load: its files of operators, and the user's that they import."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nnscaler
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from verify import Report, verify_plan

MODEL = """
import torch
from operators_NAME import scaled


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x):
        return scaled(self.layer(x)).square().sum()


def build_model():
    return Scores()


def sample_inputs():
    return {"x": torch.ones(8, 6)}
"""
OPERATORS = """
import nnscaler, torch
import helper_NAME

@torch.library.custom_op("of::scaled_NAME", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return helper_NAME.by(x)

scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, g: helper_NAME.by(g))
nnscaler.register_op("n d -> n d")(scaled)
"""
HELPER = "import os\ndef by(x): return x * 2.0\nexec(os.environ.get('OF_TWICE', ''))\n"


@dataclass(frozen=True)
class Project:
    """`model`: as it is loaded; `program`, `operators`, `helper`: of a copy of its folder, as if it was moved."""

    model: Any
    program: Path
    operators: Path
    helper: Path
    repository: Path

    def verify(self, level: str) -> Report:
        return verify_plan(
            self.model.build_model, self.model.sample_inputs(), program=self.program, level=level, backend="simulator"
        )

    def launch(self) -> str:
        """Return what the launcher says that does not come to its end; empty where it does."""
        command = [sys.executable, "-m", "nnscaler.runtime.launch", str(self.program), "--steps", "1"]
        environment = {"PYTHONPATH": str(self.repository), "PATH": ""}
        found = subprocess.run(
            [*command, "--device", "cpu"], cwd=self.program, capture_output=True, text=True, env=environment
        )
        return found.stderr if found.returncode else ""

    def edit_record(self, **entries: Any) -> None:
        """None: the entry is taken away."""
        file = self.program / "manifest.json"
        manifest = json.loads(file.read_text())
        record = {**manifest["operator_files"][self.operators.name], **entries}
        manifest["operator_files"][self.operators.name] = {n: v for n, v in record.items() if v is not None}
        file.write_text(json.dumps(manifest))


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, repository: Path) -> Project:
    name = re.sub(r"\W", "_", request.node.name)  # operators are registered once per process
    texts = {"operators": OPERATORS, "helper": HELPER, "model": MODEL}
    (tmp_path / "here").mkdir()
    for kind, text in texts.items():
        (tmp_path / "here" / f"{kind}_{name}.py").write_text(text.replace("NAME", name))
    model = load_user_module(tmp_path / "here" / f"model_{name}.py")
    program = nnscaler.parallelize(model.build_model(), model.sample_inputs(), ranks=1, plan="dp=1")
    program.save(tmp_path / "here/program")
    there = tmp_path / "there"
    shutil.copytree(tmp_path / "here", there, ignore=shutil.ignore_patterns("__pycache__"))
    return Project(model, there / "program", there / f"operators_{name}.py", there / f"helper_{name}.py", repository)


def test_a_folder_that_was_moved_with_its_files_is_as_it_was(project: Project) -> None:
    record = json.loads((project.program / "manifest.json").read_text())["operator_files"][project.operators.name]
    assert record["imports"] == {project.helper.stem: hashlib.sha256(HELPER.encode()).hexdigest()}
    for imports in (record["imports"], None):  # as older versions wrote it
        project.edit_record(imports=imports)
        report = project.verify("all")
        assert report.exit_code == 0, report.to_json()
        assert "files of operators" in [check.name for check in report.checks]
    assert project.launch() == ""


@pytest.mark.parametrize("level", ["static", "run"])
def test_a_changed_helper_is_named(project: Project, level: str) -> None:
    """In this process the operator is registered, and its run shows nothing of the other file."""
    project.helper.write_text("def by(x): return x * 3.0\n")
    report = project.verify(level)
    assert report.exit_code == 1
    changed = f"{project.helper}, which {project.operators} imports, was changed after the program was compiled"
    assert report.findings[0].code == "record_differs" and changed in report.findings[0].message
    if level == "static":
        assert changed in project.launch()
    project.edit_record(imports=None)
    report = project.verify("static")
    assert report.exit_code == 1
    found = [finding.message for finding in report.findings]
    assert len(found) == 1 and found[0].startswith(f"{project.helper} is not as ")


@pytest.mark.parametrize("level", ["static", "run"])
def test_an_operator_file_with_its_hash_is_not_the_one_that_was_verified(project: Project, level: str) -> None:
    changed = project.operators.read_text().replace("by(x)", "by(x) * 1.5")
    project.operators.write_text(changed)
    project.edit_record(sha256=hashlib.sha256(changed.encode()).hexdigest())
    report = project.verify(level)
    assert report.exit_code == 1
    (found,) = report.findings
    assert found.code == "record_differs" and found.message.startswith(f"{project.operators} is not as ")
    assert f"the program would load {project.operators}, and " in found.message


@pytest.mark.parametrize("how", [pytest.param("gone", marks=pytest.mark.long), "more"])
def test_another_set_of_files_is_another_program(project: Project, how: str) -> None:
    if how == "gone":
        project.edit_record(imports={project.helper.stem: hashlib.sha256(HELPER.encode()).hexdigest(), "of_lost": ""})
        message = f"`of_lost`, which {project.operators} imports, is not where it was"
    else:
        project.edit_record(imports={})
        message = f"{project.helper}, which {project.operators} imports, was not there when the program was compiled"
    report = project.verify("static")
    assert report.exit_code == 1
    assert message in report.findings[0].message
    assert message in project.launch()


@pytest.mark.apart
@pytest.mark.parametrize("level", ["static", "run"])
def test_an_operator_that_the_models_file_configures_is_another_one_when_it_is_launched(
    project: Project, level: str
) -> None:
    """The reference, the proof and ranks of this process have what the model's file did; a launched rank has not."""
    helper = project.model.scaled._init_fn.__globals__[project.helper.stem]
    helper.by = lambda x: x * 3.0
    report = project.verify(level)
    assert report.exit_code == 1
    (found,) = report.findings
    assert found.code == "record_differs" and "relative difference 0.33" in found.message
    assert "where its file alone is imported" in found.message and "the model's file changed" in str(found.cause)


@pytest.mark.apart
@pytest.mark.parametrize("how", ["raise ValueError('not twice')", "raise SystemExit(3)", "os._exit(3)"])
def test_operators_that_cannot_be_loaded_alone_are_noted(
    project: Project, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_TWICE", how)
    report = project.verify("static")
    assert report.exit_code == 0
    (note,) = (note for note in report.notes if "imports their files alone" in note)
    assert ("not twice" if "Value" in how else "3") in note


@pytest.mark.apart
def test_an_operator_that_its_file_alone_does_not_register_is_noted(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_TWICE", "import nnscaler; nnscaler.register_op = lambda *_: lambda target: target")
    report = project.verify("static")
    assert "operators loaded alone" not in [check.name for check in report.checks]
    assert any("no file registers it when it is imported" in note for note in report.notes)
