"""Defaults of verify-op, verify-plan and verify-external that a project sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import build_parser, main
from nnscaler.cli.options import command_defaults
from nnscaler.errors import NnscalerError
from verify.operators.run.targets import read_project

TEXT = """\
[tool.nnscaler]
seed = 7
[tool.nnscaler.verify-op]
files = ["ops.py"]
timeout = "90s"
jobs = 3
[tool.nnscaler.verify-plan]
ranks = 8
seed = 9
backend = "simulator"
[tool.nnscaler.verify-external]
executor = "gloo"
timeout = "2m"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_each_command_has_its_own(project: Path) -> None:
    words = ["verify-op"]
    options = build_parser(command_defaults(words, {})).parse_args(words)
    assert (options.seed, options.timeout, options.jobs) == (7, 90.0, 3)
    words = ["verify-plan", "m.py"]
    options = build_parser(command_defaults(words, {})).parse_args(words)
    assert (options.seed, options.ranks, options.backend, options.timeout) == (9, 8, "simulator", 300.0)
    words = ["verify-external", "check.py"]
    options = build_parser(command_defaults(words, {})).parse_args(words)
    assert (options.seed, options.executor, options.timeout, options.ranks) == (7, "gloo", 120.0, None)
    assert read_project().files == (project / "ops.py",), "what verify-op verifies is read as before"


def test_the_command_line_and_the_environment_go_first(project: Path) -> None:
    words = ["verify-plan", "m.py", "--seed", "1"]
    given = {"NNSCALER_SEED": "2", "NNSCALER_VERIFY_PLAN_RANKS": "3", "NNSCALER_VERIFY_OP_JOBS": "9"}
    options = build_parser(command_defaults(words, given)).parse_args(words)
    assert (options.seed, options.ranks) == (1, 3)
    assert command_defaults(words, given)["seed"] == 2


@pytest.mark.parametrize("word", ["--plan", "--plan=dp=2", "--program"])
def test_a_plan_has_ranks_of_its_own(project: Path, word: str) -> None:
    assert "ranks" not in command_defaults(["verify-plan", "m.py", word], {})


def test_other_commands_and_help_read_nothing(project: Path) -> None:
    Path("pyproject.toml").write_text("[tool.nnscaler]\nsede = 1\n", encoding="utf-8")
    for words in ([], ["list", "ops"], ["verify-op", "--help"], ["gate"]):
        assert command_defaults(words, {}) == {}
    with pytest.raises(NnscalerError, match="has no key 'sede'"):
        command_defaults(["verify-op"], {})


def test_a_wrong_key_is_told_with_its_place(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text("[tool.nnscaler.verify-plan]\nrnaks = 8\n", encoding="utf-8")
    assert main(["verify-plan", "m.py"]) == 2
    told = capsys.readouterr().err
    assert "pyproject.toml:2" in told and "did you mean ranks?" in told


def test_without_a_file_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_defaults(["verify-plan"], {}) == {}
