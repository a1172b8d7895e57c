"""Files that a command will write are tried before it runs, and a report is not lost when one fails at the end."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnscaler import atomic_writes
from nnscaler.cli.main import main
from nnscaler.cli.options import OutputFormat
from nnscaler.cli.output import print_reports
from nnscaler.cli.output.console import Console
from nnscaler.errors import NnscalerError
from verify import Check, Report, Verdict

REPORT = Report("verify-op", "my_op", "", 0, (Check("split", Verdict.TESTED_EXACT, 3),))
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(path: Path) -> str:
    with pytest.raises(NnscalerError) as caught:
        atomic_writes.check_writable(path)
    assert caught.value.code == "cannot_write" and str(path) in str(caught.value)
    return str(caught.value)


def test_a_new_file_leaves_nothing_and_its_folder_is_made(tmp_path: Path) -> None:
    atomic_writes.check_writable(tmp_path / "a" / "b" / "report.json")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def test_a_file_that_is_there_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("before")
    file.chmod(0o640)
    atomic_writes.check_writable(file)
    assert file.read_text() == "before" and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "it is a folder" in refused(tmp_path)
    assert "cannot write" in refused(tmp_path / "file" / "report.json")
    assert "File name too long" in refused(tmp_path / ("x" * 300))
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_without_permission(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o400)
    assert "Permission denied" in refused(tmp_path / "file")


@needs_full
def test_a_full_device() -> None:
    assert "No space left" in refused(FULL)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    atomic_writes.check_writable(tmp_path / "pipe")
    atomic_writes.check_writable("/dev/null")


def test_a_full_disk(tmp_path: Path, small_files: None) -> None:
    (tmp_path / "old").write_text("before")
    assert "File too large" in refused(tmp_path / "old")
    assert "File too large" in refused(tmp_path / "new")
    assert (tmp_path / "old").read_text() == "before" and not (tmp_path / "new").exists()


def test_a_full_file_system(tmp_path: Path) -> None:
    """A file system of 64 kB, where this process may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=64k tmpfs {disk}"
    program = f"from nnscaler.atomic_writes import check_writable; check_writable('{disk}/report')"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    run = subprocess.run([*unshare, f'{mount} && {sys.executable} -c "{program}"'], capture_output=True, text=True)
    assert run.returncode == 1 and "No space left on device" in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--html", "{0}"],
        ["--output-format", "html={0}"],
        ["--output-format", "json={0}"],
        ["--output-format", "junit={0}"],
        ["--output-format", "sarif={0}"],
        ["--output-format", "jsonl={0}"],
        ["--output-format", "github={0}"],
        ["--output-format", "concise={0}"],
        ["--output-format", "full={0}"],
        ["--emit-test", "{0}"],
    ],
)
def test_every_option_with_a_path_is_tried_before_the_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_ops.py").write_text("raise RuntimeError('it was run')\n")
    asked = [text.format(tmp_path) for text in arguments]
    assert main(["verify-op", str(tmp_path / "my_ops.py"), *asked]) == 2
    captured = capsys.readouterr()
    assert "it is a folder" in captured.err and "it was run" not in captured.err and not captured.out


@needs_full
def test_a_plan_is_not_run_for_a_report_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text("raise RuntimeError('it was run')\n")
    assert main(["verify-plan", str(tmp_path / "model.py"), "--html", str(FULL)]) == 2
    assert "No space left" in (err := capsys.readouterr().err) and "it was run" not in err
    for option in (["--comm-profile", f"json={tmp_path}"], ["--certificate", str(tmp_path)]):
        assert main(["verify-plan", str(tmp_path / "model.py"), *option]) == 2
        assert "it is a folder" in (err := capsys.readouterr().err) and "it was run" not in err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert main(["verify-plan", str(tmp_path / "model.py"), "--output-format", "github"]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_a_disk_that_fills_up_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_files: None
) -> None:
    asked = [OutputFormat("html", str(tmp_path / "r.html")), OutputFormat("concise", str(tmp_path / "r.txt"))]
    with pytest.raises(NnscalerError, match=r"cannot write .*r\.html: File too large"):
        print_reports.print_report(REPORT, asked, Console("never"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  my_op")
    assert (tmp_path / "r.txt").read_text().startswith("VERIFIED  my_op")  # the other file is written
    assert not (tmp_path / "r.html").exists()  # half a page is no page


def test_half_a_report_does_not_take_the_place_of_the_last_one(tmp_path: Path, small_files: None) -> None:
    old = tmp_path / "old.txt"
    old.write_text("whole\n")
    with pytest.raises(NnscalerError, match="File too large"):
        atomic_writes.write_text(old, "x" * 1000)
    assert old.read_text() == ""
    old.write_text("whole\n")
    with pytest.raises(NnscalerError, match="File too large"):
        atomic_writes.write_text(old, "x" * 1000, append=True)
    assert old.read_text() == "whole\n"


@needs_full
@pytest.mark.long
def test_a_screen_that_cannot_be_written_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text(
        "import nnscaler\n@nnscaler.register_op('a b -> a b')\ndef twice(x):\n    return 2 * x\n"
    )
    late = "import sys, nnscaler.cli.output.console as c, nnscaler.cli.main as m; c.Console.check = lambda self: None; "
    program = f"{late} sys.exit(m.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "verify-op", "my_ops.py::twice", "--no-cache", "-q"]
    with FULL.open("w") as full:
        run = subprocess.run(
            [*command, "--html", "r.html"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == 2 and "cannot write to standard output: No space left" in run.stderr
    assert "VERIFIED" in (tmp_path / "r.html").read_text()
