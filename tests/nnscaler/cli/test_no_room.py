"""Places that cannot be written end a command with exit code 2, the path and the cause, and leave nothing behind."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnscaler import atomic_writes
from nnscaler.cli.commands import list_things
from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from tests.sampling import every, only

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


def build_model():
    return Model()


def sample_inputs():
    return {"x": torch.randn(12, 8), "labels": torch.randint(0, 12, (12,))}
"""
TRAP = "raise RuntimeError('it was run')\n"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file grows beyond 3000 bytes, as on a disk that fills up later than it was tried."""
    monkeypatch.setattr(atomic_writes, "PROBE", 1000)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep half a file of it
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def compiled(out: str, model: str = "model.py") -> int:
    return main(["compile", model, "--ranks", "2", "--plan", "tp=2", "--out", out, "-q"])


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("model.py", "cannot write model.py: it is no folder"),
        ("model.py/inside", "cannot write model.py/inside: Not a directory"),
        (".", ". is not empty and holds no program"),
        ("x" * 300, ": File name too long"),
        ("/proc/here/program", "cannot write /proc/here/program: No such file or directory"),
    ],
)
def test_compile_says_where_it_cannot_write_before_the_model_is_loaded(
    out: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    assert compiled(out, "trap.py") == 2
    captured = capsys.readouterr()
    assert said in captured.err and "it was run" not in captured.err and captured.out == ""
    assert sorted(here.rglob("*")) == before


def _as_others_do() -> None:
    """Root may write anywhere; without this capability it may not."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_a_folder_without_permission(here: Path) -> None:
    (here / "locked").mkdir(mode=0o555)
    command = [sys.executable, "-m", "nnscaler", "compile", "trap.py", "--ranks", "2", "--out", "locked/program"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=here, preexec_fn=_as_others_do, check=False)
    assert run.returncode == 2, run.stderr
    assert "cannot write locked/program: Permission denied" in run.stderr and "it was run" not in run.stderr
    assert list((here / "locked").iterdir()) == []


def test_a_disk_that_fills_while_a_program_is_written_leaves_no_part_of_it(
    here: Path, capsys: pytest.CaptureFixture[str], small_files: None
) -> None:
    assert compiled("deep/program") == 2
    err = capsys.readouterr().err
    assert "cannot write deep/program: File too large" in err and "bug" not in err
    imported = {"__pycache__"}  # Python's own, of the model file
    assert {path.name for path in here.iterdir() if path.suffix != ".py"} - imported == set()


def test_a_trial_that_fails_names_the_folder_that_was_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str], small_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_writes, "PROBE", 5000)
    assert compiled("program", "trap.py") == 2
    assert capsys.readouterr().err.startswith("error: cannot write program: File too large\n  help: make room there")


def test_the_old_program_stays_where_the_new_one_has_no_room(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled("program") == 0
    old = {path.name: path.read_bytes() for path in Path("program").iterdir()}
    assert set(old) == {"role_0.py", "manifest.json", "plan.json", "graph.txt", "state.pt", "inputs.pt"}
    monkeypatch.setattr(atomic_writes, "PROBE", 1000)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep half a file of it
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert main(["compile", "model.py", "--ranks", "2", "--plan", "dp=2", "--out", "program", "-q"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name: path.read_bytes() for path in Path("program").iterdir()} == old
    # and a new one takes its place whole: no role of the old one, but what the user put there
    Path("program", "notes.txt").write_text("mine")
    assert main(["compile", "model.py", "--ranks", "2", "--plan", "pp=2", "--out", "program", "-q"]) == 0
    assert {path.name for path in Path("program").iterdir()} == {*old, "role_1.py", "notes.txt"}
    assert compiled("program") == 0
    assert {path.name for path in Path("program").iterdir()} == {*old, "notes.txt"}
    assert Path("program", "role_0.py").read_bytes() == old["role_0.py"]


@pytest.mark.parametrize(
    "words",
    [
        ["compile", "trap.py", "--ranks", "2", "--out", "program", "--comm-profile", "json={0}"],
        ["plan", "trap.py", "--ranks", "2", "--out", "{0}"],
        ["plan", "trap.py", "--ranks", "2", "--certificate", "{0}"],
        ["plan", "trap.py", "--ranks", "2", "--html", "{0}"],
        ["profile", "trap.py", "--out", "{0}"],
        ["verify-plan", "trap.py", "--certificate", "{0}"],
        ["verify-op", "trap.py", "--emit-test", "{0}"],
        ["reproduce", "nns1:x", "--emit-test", "{0}"],
        ["gate", "--output-format", "sarif={0}"],
        ["gate", "--html", "{0}"],
    ],
)
@pytest.mark.parametrize("where", ["folder", pytest.param(str(FULL), marks=needs_full)])
def test_every_file_that_a_command_writes_is_tried_first(
    words: list[str], where: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "folder").mkdir()
    (here / "pyproject.toml").write_text('[tool.nnscaler.gate.ops]\nfiles = ["trap.py"]\n')
    assert main([word.format(where) for word in words]) == 2
    captured = capsys.readouterr()
    assert f"cannot write {where}: " in captured.err and "it was run" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["verify-plan", "trap.py", "--ranks", "2"],
        ["verify-op", "trap.py"],
        ["profile", "trap.py"],
        ["gate"],
        ["self-test", "ops"],
        ["self-test", "plans"],
        ["reproduce", "nns1:x"],
    ],
)
def test_a_full_temporary_folder_is_told_before_the_work(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pyproject.toml").write_text('[tool.nnscaler.gate.ops]\nfiles = ["trap.py"]\n')

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_writes, "_fill", full)
    # in this order: the first module takes the name from the second one when it is imported, here for the first time
    monkeypatch.setattr("nnscaler.cli.output.print_reports.check_writable", lambda path: None)
    monkeypatch.setattr(atomic_writes, "check_writable", lambda path: None)  # profile.json
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"cannot write temporary files to {tempfile.gettempdir()}: No space left on device" in err
    assert "TMPDIR=/path" in err and "it was run" not in err


def test_no_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*arguments: object) -> object:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "TemporaryFile", nowhere)
    with pytest.raises(NnscalerError, match="cannot write temporary files: No usable temporary directory") as caught:
        atomic_writes.check_temporary()
    assert "TMPDIR" in str(caught.value)


@pytest.mark.parametrize("backend", every(2, ["simulator", "gloo"]))
@pytest.mark.apart
def test_a_disk_that_fills_up_during_a_run_is_no_verdict(backend: str, here: Path, small_files: None) -> None:
    """Neither REFUTED (a rank raised) nor a bug; the files of the parent are small enough, those of a rank not."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            _LIMITED,
            "verify-plan",
            "model.py",
            "--plan=dp=2",
            "--level=run",
            f"--backend={backend}",
        ],
        capture_output=True,
        text=True,
        cwd=here,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert run.returncode == 2, run.stdout + run.stderr
    assert f"cannot write temporary files to {tempfile.gettempdir()}: File too large" in run.stderr
    assert "REFUTED" not in run.stdout and "bug of nnScaler" not in run.stderr


# the limit is set after the parent has written its own files, and is inherited by what it starts
_LIMITED = """
import resource, sys
sys.dont_write_bytecode = True  # half a file of it would be kept
from nnscaler import atomic_writes
from nnscaler.cli.main import main
import verify.programs.verification_phases

def limited(*arguments, run=verify.programs.verification_phases.run_program, **more):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    return run(*arguments, **more)

verify.programs.verification_phases.run_program = limited
sys.exit(main(sys.argv[1:]))
"""


@needs_full
@pytest.mark.parametrize(
    "words", every(2, [["list", "ops"], ["--help"], ["list", "plans", "--json"], ["explain", "timed_out"]])
)
def test_a_full_standard_output(words: list[str]) -> None:
    with FULL.open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "nnscaler", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert run.returncode == 2
    assert run.stderr == "error: cannot write to standard output: No space left on device\n"


@needs_full
def test_a_full_standard_output_is_told_before_the_work(here: Path) -> None:
    command = [sys.executable, "-m", "nnscaler", "compile", "trap.py", "--ranks", "2", "--out", "program"]
    with FULL.open("w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=here, check=False)
    assert run.returncode == 2 and "cannot write to standard output: No space left" in run.stderr
    assert "it was run" not in run.stderr and not (here / "program").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    only(
        (0, 3),
        [
            ("list ops", 0),
            ("explain timed_out", 0),
            ("--help", 0),
            ("verify-op ops.py --no-prove --cases 4 --output-format json=ops.json", 1),
        ],
    ),
)
def test_a_reader_that_leaves_is_no_error_and_files_are_written_all_the_same(words: str, code: int, here: Path) -> None:
    """The exit code is the verdict's: everything was verified before the reader left."""
    (here / "ops.py").write_text(
        "import nnscaler, torch\n@nnscaler.register_op('a b -> a b')\n"
        "def wrong(x: torch.Tensor) -> torch.Tensor:\n    return x.softmax(-1)\n"
    )
    script = f"{sys.executable} -m nnscaler {words} -q 2>err | true; exit ${{PIPESTATUS[0]}}"
    if "--help" in words:
        script = script.replace(" -q", "")
    run = subprocess.run(["bash", "-c", script], cwd=here, check=False)
    assert run.returncode == code and (here / "err").read_text() == ""
    assert (here / "ops.json").exists() == ("ops.json" in words)


def test_a_closed_standard_output() -> None:
    run = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m nnscaler list plans >&-"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2 and run.stderr == "error: cannot write to standard output: it is closed\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "plan.json"), "error: cannot open plan.json: Permission"),
        (OSError(errno.ENOSPC, "No space left", "/x/y"), "error: cannot write /x/y: No space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "error: cannot write temporary files to "),
    ],
)
def test_what_the_machine_refuses_is_no_bug_of_ours(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(options: object) -> int:
        raise error

    monkeypatch.setattr(list_things, "run", command)
    assert main(["list", "ops"]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_bug_that_comes_after_a_refusal_is_still_a_bug() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise PermissionError(errno.EACCES, "Permission denied", "plan.json")
        except PermissionError:
            raise KeyError("ours")  # noqa: B904 - a bug, as it comes
    assert atomic_writes.machine_error(caught.value) is None


def test_a_verdict_stands_where_the_program_cannot_be_kept(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verify.programs import assemble_report

    assert compiled("program") == 0
    wrong = Path("program", "role_0.py")
    wrong.write_text(wrong.read_text().replace("aten.tanh", "aten.sigmoid"))
    original = assemble_report.keep_program

    def no_room(*arguments: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("verify.programs.assemble_report.shutil.copyfile", no_room)
    kept: list[str] = []
    made = tempfile.mkdtemp

    def noted(*arguments: object, **more: object) -> str:
        kept.append(made(*arguments, **more))  # type: ignore[call-overload]
        return kept[-1]

    monkeypatch.setattr("verify.programs.assemble_report.tempfile.mkdtemp", noted)

    def keep(
        report: assemble_report.Report, program: Path, request: assemble_report.PlanRequest
    ) -> assemble_report.Report:
        from dataclasses import replace

        return original(report, program, replace(request, program=None))  # as if it had been compiled here

    monkeypatch.setattr("verify.programs.verification_phases.keep_program", keep)
    assert main(["verify-plan", "model.py", "--program", "program", "--level", "static", "-q"]) == 1
    out = capsys.readouterr().out
    assert "note: the program could not be kept: No space left on device" in out
    assert any("nnscaler-program-" in folder for folder in kept) and not any(map(os.path.exists, kept))
