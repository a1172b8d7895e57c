"""The README's commands. `.ci/run` executes the first two by their own text, one after the other in one environment;
the long test executes each of them in a fresh copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnscaler
from ci.readme_commands import read_commands

SECONDS = 600
INHERITED_BY_MISTAKE = ("PYTEST_", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "NNSCALER_")


@pytest.fixture
def fresh_copy(files: list[Path], repository: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield a copy of what a clone of the working tree would hold.

    It is removed afterwards: its environment takes more than 1 GB.
    """
    for path in files:
        target = tmp_path / "nnscaler" / path.relative_to(repository)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    yield tmp_path / "nnscaler"
    shutil.rmtree(tmp_path / "nnscaler")


def execute(command: str, folder: Path, **extra: str) -> str:
    """Return the output of the command. Fails unless it exits 0; a command that hangs is killed with its children."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED_BY_MISTAKE)}
    # The interpreter that runs the tests is the `python3` of the command: the first one on a machine may be too old.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment |= {"PYTHONNOUSERSITE": "1", **extra}
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not finished after {SECONDS} s: {command}\n{output}")
    assert process.returncode == 0, f"exit {process.returncode}: {command}\n{output}"
    return output


def test_readme_has_three_commands() -> None:
    verify, test, train = read_commands()
    install = "python3 -m venv --upgrade-deps .venv && . .venv/bin/activate && pip install -e '.[test]' && "
    assert verify == install + "nnscaler verify-plan examples/gpt.py --ranks 8 --plan dp=2,tp=2,pp=2"
    assert test == install + "pytest -n auto"
    assert train == "nnscaler train examples/gpt.toml"


def ci_run(folder: Path, repository: Path, verify: str, test: str) -> subprocess.CompletedProcess[str]:
    """Runs `.ci/run` where the README has these two commands."""
    for name in (".ci/run", "ci/readme_commands.py"):
        (folder / name).parent.mkdir()
        shutil.copy2(repository / name, folder / name)
    (folder / "README.md").write_text(f"```sh\n{verify}\n```\n\n```sh\n{test}\n```\n")
    (folder / ".venv").mkdir()
    environment = os.environ | {"PYTHONPATH": "mine", "PYTEST_ADDOPTS": "-k none", "NNSCALER_LEVEL": "run"}
    command = ["bash", str(folder / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ci_runs_both_commands_and_repeats_the_closing_line(repository: Path, tmp_path: Path) -> None:
    verify = "test ! -e .venv && touch made && echo VERIFIED '' gpt.py on 8 ranks: 7 checks"
    test = "test -e made && env && echo == 4 passed in 1s == && echo bye && exit 3"
    found = ci_run(tmp_path, repository, verify, test)
    assert found.returncode == 3, found.stderr
    lines = found.stdout.splitlines()
    assert lines[:3] == [f"+ {verify}", "VERIFIED  gpt.py on 8 ranks: 7 checks", f"+ {test}"]
    assert lines[-3:] == ["== 4 passed in 1s ==", "bye", "== 4 passed in 1s =="]
    inherited = {line.split("=")[0] for line in lines[3:-3]}
    assert {"CI", "PYTHONNOUSERSITE"} <= inherited
    assert not inherited & {"PYTHONPATH", "PYTEST_ADDOPTS", "NNSCALER_LEVEL", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}


@pytest.mark.parametrize(("verify", "status"), [("echo REFUTED && exit 5", 5), ("echo done", 1)])
def test_ci_fails_where_the_first_command_does(repository: Path, tmp_path: Path, verify: str, status: int) -> None:
    found = ci_run(tmp_path, repository, verify, "echo 4 passed")
    assert found.returncode == status
    assert "4 passed" not in found.stdout


def test_readme_probe(repository: Path) -> None:
    """The one test that the second command runs when the test below executes it."""
    assert Path(nnscaler.__file__).parent == repository / "nnscaler"


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS + 60)
def test_readme_commands_work(fresh_copy: Path, repository: Path) -> None:
    verify, test, train = read_commands()
    output = execute(verify, fresh_copy)
    assert output.strip().splitlines()[-1].startswith("VERIFIED  gpt.py on 8 ranks"), output

    # The whole suite would run this test again, which would run the suite: one test shows that the command works.
    this_file = Path(__file__).relative_to(repository)
    output = execute(test, fresh_copy, PYTEST_ADDOPTS=f"{this_file} -k test_readme_probe")
    assert "1 passed" in output.strip().splitlines()[-1], output

    output = execute(f". .venv/bin/activate && {train} --loggers.every=150", fresh_copy)
    found = float(re.findall(r"step 600  validation loss (\S+)", output)[-1])
    assert found < 2.0, output  # as docs/train.md says
