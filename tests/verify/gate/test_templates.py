"""The templates that users copy from `ci/` are valid for GitHub, GitLab and pre-commit."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nnscaler.cli.main import build_parser
from tests.pages.blocks import read_blocks

ROOT = Path(__file__).resolve().parents[3]
GITHUB = ROOT / "ci" / "github-workflow.yml"
GITLAB = ROOT / "ci" / "gitlab-ci.yml"
HOOKS = ROOT / ".pre-commit-hooks.yaml"


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def validate(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", *options, str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def parsed(command: str) -> argparse.Namespace:
    words = shlex.split(command)
    assert words[0] == "nnscaler"
    return build_parser().parse_args(words[1:])


def test_the_github_workflow_keeps_to_its_schema(tmp_path: Path) -> None:
    assert validate(GITHUB, "--builtin-schema", "vendor.github-workflows").returncode == 0
    broken = tmp_path / "broken.yml"
    broken.write_text(GITHUB.read_text(encoding="utf-8").replace("runs-on:", "run-on:"), encoding="utf-8")
    assert validate(broken, "--builtin-schema", "vendor.github-workflows").returncode == 1


def test_the_gitlab_job_keeps_to_its_schema(tmp_path: Path) -> None:
    options = ("--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
    assert validate(GITLAB, *options).returncode == 0
    broken = tmp_path / "broken.yml"
    broken.write_text(GITLAB.read_text(encoding="utf-8").replace("when: always", "when: ever"), encoding="utf-8")
    assert validate(broken, *options).returncode == 1


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed: it is no Python package")
def test_the_github_workflow_passes_actionlint() -> None:
    result = subprocess.run(["actionlint", str(GITHUB)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_github_workflow_uploads_what_the_gate_writes() -> None:
    steps = {step.get("name"): step for step in read(GITHUB)["jobs"]["gate"]["steps"]}
    options = parsed(steps["Gate"]["run"])
    written = {output.name: output.path for output in options.output_format}
    assert written == {"full": None, "github": None, "sarif": "nnscaler.sarif", "junit": "nnscaler.xml"}
    assert steps["Upload findings"]["with"]["sarif_file"] == written["sarif"]
    assert "!cancelled()" in steps["Upload findings"]["if"], "a gate that fails has findings"


def test_the_gitlab_job_keeps_what_the_gate_writes() -> None:
    job = read(GITLAB)["nnscaler-gate"]
    (command,) = job["script"]
    written = {output.name: output.path for output in parsed(command).output_format}
    assert job["artifacts"]["reports"]["junit"] == written["junit"]
    assert job["artifacts"]["paths"] == [written["json"]]
    assert job["artifacts"]["when"] == "always"
    assert "allow_failure" not in job


def test_the_hooks_run_commands_that_exist() -> None:
    hooks = {hook["id"]: hook for hook in read(HOOKS)}
    assert list(hooks) == ["nnscaler-verify-op", "nnscaler-gate"]
    for hook in hooks.values():
        parsed(hook["entry"])
        assert hook["pass_filenames"] is False
        assert hook["require_serial"] is True
        assert hook["language"] == "python"


def test_what_the_guide_shows_for_pre_commit_names_these_hooks() -> None:
    blocks = [block.text for block in read_blocks(ROOT / "docs" / "gate.md") if block.language == "yaml"]
    shown = [hook for block in blocks for repo in yaml.safe_load(block)["repos"] for hook in repo["hooks"]]
    known = {hook["id"] for hook in read(HOOKS)}
    assert {hook["id"] for hook in shown} == known
    system, own = [h for h in shown if h.get("language") == "system"], [h for h in shown if "language" not in h]
    assert len(system) == 2 and len(own) == 1, "the environment of the models, or one that names what they import"
    assert all(hook["additional_dependencies"] for hook in own)
