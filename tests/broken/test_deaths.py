"""Programs that end the process that runs them, or would if torch were let: findings, and no end of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.cli.main import main
from tests.broken.planting import Edit, Original, assert_refuted

pytestmark = pytest.mark.apart
BACKENDS = ("simulator", pytest.param("gloo", marks=pytest.mark.long))
# The first thread that comes here: another signal while Python writes the stacks of the first one would cut them short.
ONCE = "(me := __import__('threading').current_thread()) is __import__('sys').modules.setdefault('killed', me)"
KILLS = f"        {ONCE} and __import__('signal').raise_signal({{}}); tanh = "


def killed_by(number: int) -> Edit:
    return Edit("        tanh = ", KILLS.format(number))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crash(small_sharded: Original, tmp_path: Path, backend: str) -> None:
    report = small_sharded.verify(small_sharded.broken(tmp_path, [killed_by(11)]), backend=backend)
    assert report.exit_code == 1
    finding = report.findings[0]
    assert finding.code == "rank_died" and "killed by SIGSEGV" in finding.message
    if backend == "simulator":
        assert finding.where is not None and Path(finding.where.file).name == "models.py"
        assert "role_0.py" in finding.counter_example["it was running"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_killed_from_outside(small_sharded: Original, tmp_path: Path, backend: str) -> None:
    report = small_sharded.verify(small_sharded.broken(tmp_path, [killed_by(9)]), backend=backend)
    assert report.exit_code == 3 and report.findings[0].code == "rank_died"


def test_a_crash_from_the_command_line(
    small_sharded: Original, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = small_sharded.broken(tmp_path, [killed_by(6)])
    model = str(repository / "tests/broken/models.py")
    assert main(["verify-plan", model, "--program", str(program), "--backend", "simulator", "--level", "run"]) == 1
    written = capsys.readouterr().out
    assert "rank_died" in written and "killed by SIGABRT" in written and "REFUTED" in written.splitlines()[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_fewer_keys_than_values(sharded: Original, tmp_path: Path, backend: str) -> None:
    """torch's kernel would read on behind the keys, where the right ones lie, and in backward write there."""
    text = (sharded.folder / "role_0.py").read_text(encoding="utf-8")
    call = next(line for line in text.splitlines() if "= aten.scaled_dot_product_attention(" in line)
    key = call.partition("(")[2].split(", ")[1]
    edit = Edit(call, call.replace(f", {key}, ", f", {key}[:, :, :3], "))
    report = sharded.verify(sharded.broken(tmp_path, [edit]), backend=backend)
    finding = assert_refuted(report, "rank_raises", call.partition("=")[0].strip())
    assert "attention of 3 keys and 5 values" in finding.message
