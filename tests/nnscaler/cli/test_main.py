"""Exit codes: one test for each, and what the user reads with it."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnscaler.cli.commands import list_things
from nnscaler.cli.main import main
from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError, SourceLocation

OPS = """
import nnscaler, torch

@nnscaler.register_op("m k+, k+ n -> m n", name="{name}_right")
def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b

@nnscaler.register_op("a b -> a b", name="{name}_wrong")
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)

@nnscaler.register_op("a -> a", name="{name}_nothing")
def nothing(x: torch.Tensor) -> torch.Tensor:
    return x * 0

def plain(x):
    return x * 2
"""


@pytest.fixture
def ops(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    file = tmp_path / "my_ops.py"
    file.write_text(OPS.format(name=request.node.name.replace("[", "_").replace("]", "")))
    return str(file)


def replace_command(monkeypatch: pytest.MonkeyPatch, command: Callable[[argparse.Namespace], Any]) -> None:
    monkeypatch.setattr(list_things, "run", command)


def raising(error: BaseException) -> Callable[[argparse.Namespace], Any]:
    def command(options: argparse.Namespace) -> Any:
        raise error

    return command


def test_0_verified(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::right"]) == ExitCode.VERIFIED == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  ")


def test_1_refuted(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::wrong"]) == ExitCode.REFUTED == 1
    out = capsys.readouterr().out
    assert "annotation_wrong" in out and out.splitlines()[-1].startswith("REFUTED  ")


def test_3_inconclusive(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::nothing"]) == ExitCode.INCONCLUSIVE == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("INCONCLUSIVE  ")


def test_the_worst_operator_of_a_file_counts(ops: str) -> None:
    assert main(["verify-op", ops, "-q"]) == ExitCode.REFUTED


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["verify-plan"],
        ["verify-plan", "model.py", "--ranks", "0"],
        ["verify-plan", "model.py", "--ranks", "two"],
        ["verify-plan", "model.py", "--output-format", "xml"],
        ["verify-plan", "model.py", "--timeout", "-1"],
        ["verify-plan", "no_such_file.py"],
        ["verify-op", "no_such_operator"],
        ["verify-external", "no_such_file.py"],
        ["list", "everything"],
    ],
)
def test_2_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.COULD_NOT_RUN == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error" in captured.err


def test_2_what_the_user_can_fix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = SourceLocation("model.py", 3, "return loss.item()")
    replace_command(monkeypatch, raising(NnscalerError("trace_failed", "no trace", place, "try this")))
    assert main(["list", "ops"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no trace",
        "  --> model.py:3   return loss.item()",
        "  help: try this",
    ]


@pytest.mark.parametrize("code", ["text", 1, 0, None])
def test_2_when_the_users_code_exits(
    code: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_command(monkeypatch, raising(SystemExit(code)))
    assert main(["list", "ops"]) == 2
    assert "stopped the process" in capsys.readouterr().err


def test_101_our_own_crash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_command(monkeypatch, raising(AssertionError("impossible")))
    assert main(["list", "ops"]) == ExitCode.INTERNAL_ERROR == 101
    err = capsys.readouterr().err
    assert err.startswith("internal error: AssertionError: impossible")
    assert len(err.splitlines()) <= 8
    log = Path(err.strip().splitlines()[-1].rpartition(": ")[2])
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_is_lost_on_its_way_still_makes_the_exit_code(name: str) -> None:
    """Python drops an exception that is raised while a finaliser runs."""
    program = f"""
import os, signal, sys, nnscaler.cli.console_script as entry, nnscaler.cli.main as m
class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
def command(argv=None):
    Finalised()
    return 0
m.main = command
sys.exit(entry.run_process())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Exception ignored" in found.stderr
    assert found.returncode == 128 + getattr(signal, name)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_the_command_is_imported(name: str) -> None:
    """The entry imports the handlers first, so that no traceback is shown."""
    program = f"""
import os, signal, sys
class Sends:
    def find_spec(self, module, path=None, target=None):
        if module == "nnscaler.cli.main":
            os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, Sends())
import nnscaler.__main__
sys.exit(nnscaler.__main__.run_process())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = "interrupted" if name == "SIGINT" else "terminated"
    assert (found.returncode, found.stderr) == (128 + getattr(signal, name), f"{said}\n")


def test_130_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_command(monkeypatch, raising(KeyboardInterrupt()))
    assert main(["list", "ops"]) == ExitCode.INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["verify-plan", "--help"], ["verify-op", "--help"]])
def test_help_is_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify-plan", "compile", "verify-op", "verify-external", "list"):
        main([command, "--help"])
        out = capsys.readouterr().out
        assert "examples:" in out and "exit codes:" in out


@pytest.mark.parametrize("what", ["ops", "plans", "schedules"])
def test_list(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_results_on_stdout_and_progress_on_stderr(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify-op", f"{ops}::right", "--output-format", "json"])
    import json

    assert json.loads(capsys.readouterr().out)["verdict"] == "VERIFIED"


def test_json_to_a_file_and_text_to_the_screen(ops: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    target = tmp_path / "report.json"
    assert main(["verify-op", f"{ops}::wrong", "--output-format", f"json={target}"]) == 1
    assert json.loads(target.read_text())["findings"][0]["code"] == "annotation_wrong"
    assert capsys.readouterr().out.splitlines()[-1].startswith("REFUTED  ")


def test_an_unwritable_report_is_not_a_verdict(ops: str) -> None:
    assert main(["verify-op", f"{ops}::wrong", "--output-format", f"json={ops}/where.json"]) == 2


def test_an_unregistered_function_needs_an_annotation(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::plain"]) == 2
    assert "no annotation" in capsys.readouterr().err
    assert main(["verify-op", f"{ops}::plain", "--annotation", "a b -> a b"]) == 0


HELP = """
import sys
from nnscaler.cli.main import build_parser, main

(commands,) = build_parser()._subparsers._group_actions
names = [["list", name] for name in ("plans", "schedules")]
for words in (*([name, "--help"] for name in commands.choices), *names, ["explain", "loss_differs"], ["--version"]):
    assert main(words) == 0, words
    if "torch" in sys.modules:
        sys.exit(f"{words} imports torch")
"""


def test_help_and_lists_of_names_do_not_import_torch() -> None:
    run = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_closed_pipe_is_not_a_verdict(repository: Path) -> None:
    command = 'import sys; from nnscaler.cli.main import main; sys.exit(main(["list", "ops"]))'
    script = f"{sys.executable} -c {shlex.quote(command)} | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=repository, check=False)
    assert found.returncode in (0, 2)
    assert "Traceback" not in found.stderr
