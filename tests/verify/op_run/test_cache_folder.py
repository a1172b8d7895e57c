"""Where the cache lies: with the user, or where the project says; nowhere where there is no place for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.pyproject_settings import cache_folder
from verify.gate.run_order import state_file
from verify.operators.run.cache import Cache, open_cache
from verify.programs.lemmas import open_memo
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

PASSED = Report("verify-op", "my_op", "", 0, (Check("split", Verdict.TESTED_EXACT, 3),))


def test_the_cache_lies_with_the_user_and_never_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text("[tool.nnscaler]\nseed = 1\n")
    monkeypatch.chdir(inner)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_cache("verify_op") == Cache(tmp_path / "xdg" / "nnscaler" / "verify_op")
    assert open_memo().disk == Cache(tmp_path / "xdg" / "nnscaler" / "lemmas")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert cache_folder() == tmp_path / "home" / ".cache" / "nnscaler"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "nnscaler"
    assert sorted(path.name for path in (tmp_path / "project").rglob("*")) == ["inner", "pyproject.toml"]
    # but where the project says so
    (tmp_path / "project" / "pyproject.toml").write_text('[tool.nnscaler]\ncache = "build/kept"\n')
    assert open_cache("verify_op").folder == tmp_path / "project" / "build" / "kept" / "verify_op"
    assert open_cache("verify_op", tmp_path).folder == tmp_path / "home" / ".cache" / "nnscaler" / "verify_op"
    (tmp_path / "project" / "pyproject.toml").write_text("[tool.nnscaler]\ncache = 3\n")
    with pytest.raises(NnscalerError, match="is a text, not 3"):
        open_cache("verify_op")


def test_two_projects_of_one_name_have_a_state_each(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "project", tmp_path / "b" / "project"
    assert state_file(one) != state_file(other)
    assert state_file(one) == state_file(tmp_path / "a" / "x" / ".." / "project")


@pytest.mark.parametrize(
    ("home", "said"),
    [
        ("/proc/nobody", "cannot write /proc/nobody/.cache/nnscaler: "),
        ("{0}/file", "cannot write {0}/file/.cache/nnscaler: Not a directory; set XDG_CACHE_HOME, or cache ="),
        (None, "there is no home folder; set XDG_CACHE_HOME, or cache ="),
    ],
)
def test_without_a_home_nothing_is_kept_and_a_note_says_so(
    home: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "my_ops.py").write_text(
        f"import nnscaler, torch\n@nnscaler.register_op('a b -> a b', name='no_home_{len(said)}')\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home is None:  # no variable, and a user whom the system does not know
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
    else:
        monkeypatch.setenv("HOME", home.format(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert main(["verify-op", "my_ops.py", "--no-prove", "--jobs", "1"]) == 0
    err = capsys.readouterr().err
    assert f"warning: nothing is kept between runs: {said.format(tmp_path)}" in err
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before
    memo = open_memo()
    assert memo.disk is not None and memo.disk.problem is not None
    memo.disk.store("key", PASSED)
    assert memo.disk.load("key") is None
