"""`nnscaler verify-op` and `nnscaler reproduce` as a user types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nnscaler.cli.main import main

OPS = """
import os, time
import nnscaler, torch
from torch import Tensor


@nnscaler.register_op("m k+, k+ n -> m n", name="{0}_right")
def right(a: Tensor, b: Tensor) -> Tensor:
    print("printed by the operator")
    return a @ b


@nnscaler.register_op("a b -> a b", name="{0}_wrong")
def wrong(x: Tensor) -> Tensor:
    return x.softmax(-1)


@nnscaler.register_op("a b -> a b", name="{0}_dies")
def dies(x: Tensor) -> Tensor:
    os.abort()


@nnscaler.register_op("a b -> a b", name="{0}_hangs")
def hangs(x: Tensor) -> Tensor:
    time.sleep(600)
    return x


def plain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def inputs():
    return torch.randn(4, 6), torch.randn(6, 8)
"""
QUICK = ("--no-prove", "--cases", "4")


@pytest.fixture
def ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_ops.py").write_text(OPS.format(re.sub(r"\W", "_", request.node.name)))
    return "my_ops.py"


def test_several_targets_a_line_each(ops: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::right", f"{ops}::wrong", f"{ops}::dies", *QUICK, "--jobs", "2"]) == 1
    captured = capfd.readouterr()
    assert "printed by the operator" in captured.err and "printed by the operator" not in captured.out
    assert re.search(r"\d of 3  PASS test_\w+_right  TESTED \(exact\)", captured.err)
    assert "annotation_wrong" in captured.out and "operator_died" in captured.out
    last = captured.out.splitlines()[-1]
    assert last.startswith("REFUTED  3 operators (1 refuted, 1 inconclusive, 1 verified): ")


def test_a_hang_ends(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::hangs", "--timeout", "1"]) == 3
    assert "operator_timed_out" in capsys.readouterr().out


def test_a_second_run_is_cached(ops: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify-op", f"{ops}::right", "aten.relu", *QUICK]
    assert main(command) == 0
    assert "cached:" not in capsys.readouterr().out
    cache = Path(os.environ["XDG_CACHE_HOME"], "nnscaler")
    assert (cache / ".gitignore").read_text() == "*\n" and len(list((cache / "verify_op").glob("*.json"))) == 2
    assert {path.name for path in tmp_path.iterdir()} <= {"my_ops.py", "__pycache__"}
    assert main(command) == 0
    assert "cached: 2 of 2" in capsys.readouterr().out
    assert main([*command, "--seed", "1"]) == 0
    assert "cached:" not in capsys.readouterr().out
    assert main([*command, "--no-cache"]) == 0
    assert "cached:" not in capsys.readouterr().out


def test_a_failure_is_never_cached(ops: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["verify-op", f"{ops}::wrong", *QUICK]) == 1
    assert not list(tmp_path.rglob("*.json"))


def reproduce_line(out: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if line.strip().startswith("reproduce:")]
    return shlex.split(line.partition(":")[2])


@pytest.mark.parametrize("corrected", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_line_to_reproduce_works_in_a_new_process(
    ops: str, repository: Path, capsys: pytest.CaptureFixture[str], corrected: bool
) -> None:
    main(["verify-op", f"{ops}::wrong", *QUICK])
    words = reproduce_line(capsys.readouterr().out)
    assert words[:2] == ["nnscaler", "reproduce"] and words[2].startswith("nns1:")
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nnscaler", *words[1:]]
    if corrected:
        file = Path(ops)
        file.write_text(file.read_text().replace("x.softmax(-1)", "x * 2"))
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if not corrected:
        assert found.returncode == 1, found.stderr
        assert "annotation_wrong" in found.stdout and "= expected:" in found.stdout and "= found:" in found.stdout
    else:
        assert found.returncode == 0 and found.stdout.splitlines()[-1].startswith("VERIFIED"), found.stdout


def test_tokens_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("nonsense", "nns1:abc"):
        assert main(["reproduce", word]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "error:" in captured.err and "help:" in captured.err


def test_emitted_tests(ops: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::wrong", *QUICK, "--emit-test", "test_wrong.py"]) == 1
    captured = capsys.readouterr()
    assert "wrote test_wrong.py" in captured.err
    text = (tmp_path / "test_wrong.py").read_text()
    assert "def test_wrong_annotation_wrong():" in text
    words = reproduce_line(captured.out)
    assert main([*words[1:], "--emit-test", "test_again.py"]) == 1
    assert (tmp_path / "test_again.py").read_text() == text
    assert main(["verify-op", f"{ops}::wrong", "--emit-test", f"{ops}/where.py"]) == 2


def test_an_annotation_for_a_plain_function(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::plain", "--annotation", "m k+, k+ n -> m n", *QUICK]) == 0
    assert main(["verify-op", f"{ops}::plain", "--annotation", "m k, k n -> m n", *QUICK]) == 1
    words = reproduce_line(capsys.readouterr().out)
    assert main(words[1:]) == 1
    assert main(["verify-op", ops, "--annotation", "m k+, k+ n -> m n"]) == 2


def test_suggest_for_a_function_without_annotation(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::plain", "--suggest", *QUICK]) == 2
    assert "sample_inputs" in capsys.readouterr().err
    assert main(["verify-op", f"{ops}::plain", "--sample-inputs", "inputs", "--suggest", *QUICK]) == 0
    out = capsys.readouterr().out
    assert re.search(r'has no annotation; this one holds \(tested\): "\S \w\+, \w\+ \w -> \S \w"', out)


def test_settings_of_the_project(ops: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op"]) == 2
    assert "[tool.nnscaler.verify-op]" in capsys.readouterr().err
    package = tmp_path / "some_ops"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        "import nnscaler\nfrom torch import Tensor\n@nnscaler.register_op('a b -> a b', name='command_double')\n"
        "def double(x: Tensor) -> Tensor:\n    return x * 2\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.nnscaler.verify-op]\nmodules = ["some_ops"]\n')
    assert main(["verify-op", *QUICK]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  command_double ")


def test_fail_fast(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    targets = [f"{ops}::wrong", f"{ops}::right", "aten.relu", "aten.gelu"]
    assert main(["verify-op", *targets, *QUICK, "--fail-fast", "--jobs", "1"]) == 1
    captured = capsys.readouterr()
    assert "3 of 4 operators were not verified" in captured.err
    assert captured.out.splitlines()[-1].startswith("REFUTED  test_fail_fast_wrong")


def test_formats_side_by_side(ops: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--output-format", "json=out.json", "--output-format", "junit=out.xml", "--output-format", "jsonl"]
    assert main(["verify-op", f"{ops}::right", f"{ops}::wrong", *QUICK, *formats]) == 1
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "REFUTED"
    assert "<testsuite" in (tmp_path / "out.xml").read_text()
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", "aten.relu", "aten.neg", *QUICK, "--no-cache", "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["aten.nothing_of_the_kind"],
        ["--module", "no_such_module_anywhere"],
        ["aten.relu", "--jobs", "0"],
        ["aten.relu", "--timeout", "0"],
        ["aten.relu", "--profile", "deeper"],
        ["aten.relu", "aten.gelu", "--annotation", "a -> a"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error" in captured.err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--all", "--module", "--emit-test", "--profile", "--no-cache", "[tool.nnscaler.verify-op]", "aten."):
        assert word in out
    assert max(map(len, out.splitlines())) <= 140


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_ctrl_c_leaves_nothing_behind(ops: str, repository: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nnscaler", "verify-op", f"{ops}::hangs", f"{ops}::right", "--timeout", "600"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:  # one is done, the other hangs
        if "1 of 2" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130 and errors.endswith("interrupted\n")
    with pytest.raises(ProcessLookupError):  # nobody is left in its group
        os.killpg(process.pid, 0)
