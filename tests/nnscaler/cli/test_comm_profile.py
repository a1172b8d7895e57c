"""--comm-profile: the table, the file, and what is refused before the run."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nnscaler.cli.main import main
from nnscaler.cli.output.communication_profile import (
    ProfileOutput,
    add_option,
    class_lines,
    memory_lines,
    show_profile,
    total_lines,
)
from nnscaler.cli.output.console import Console
from nnscaler.errors import NnscalerError
from nnscaler.manifest import CommunicationProfile, StageMemory
from nnscaler.records_as_json import decode


def entry(**changes: Any) -> dict[str, Any]:
    when = {"text": "F of stage 0, each micro-batch", "first": 0, "last": 4, "of": 8}
    return {
        "kind": "all_reduce", "direction": "forward", "stage": 0, "to_stage": None, "axis": "tp", "group": "0-7",
        "group_size": 8, "groups": 4, "dtype": "float32", "reduction": "sum", "bytes": 3 * 2**20, "calls": 8,
        "total_bytes": 3 * 2**28, "wire_bytes": 1, "when": when, "module": "h.*.mlp", "where": "m.py:3", **changes,
    }  # fmt: skip


DATA = {
    "version": 1,
    "unit": "bytes per step",
    "totals": [{"axis": "tp", "kind": "all_reduce", "direction": "forward", "calls": 4096, "bytes": 1536}],
    "classes": [entry(), entry(stage=1), entry(axis="dp", total_bytes=5, bytes=5, stage=1)],
}


PROFILE = decode(CommunicationProfile, DATA)


class _Text(Console):
    def __init__(self) -> None:
        super().__init__("never")
        self._out = io.StringIO()

    @property
    def text(self) -> str:
        assert isinstance(self._out, io.StringIO)
        return self._out.getvalue()


def parse(*arguments: str) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_option(parser)
    return parser.parse_args(arguments).comm_profile


def test_values_of_the_option() -> None:
    assert parse() is None and parse("--comm-profile") == ProfileOutput()
    assert parse("--comm-profile", "json=a=b.json") == ProfileOutput("a=b.json")
    for wrong in ("json", "json=", "xml=a", "model.py"):
        with pytest.raises(argparse.ArgumentError, match="is not json=PATH"):
            parse("--comm-profile", wrong)


def test_totals() -> None:
    head, line = total_lines(PROFILE)
    assert head.split() == ["axis", "collective", "direction", "calls", "a", "step", "bytes", "a", "step"]
    assert line.split() == ["tp", "all_reduce", "forward", "4,096", "1.5", "KiB"]
    assert total_lines(replace(PROFILE, totals=(), classes=())) == ["communication: none"]


def test_memory_of_equal_stages_shares_a_line() -> None:
    rows = [StageMemory(i, i, str(i), 2048, 1024, 512 * (i > 1), 3584, 4096) for i in range(3)]
    head, first, last = memory_lines(rows)
    assert head.split()[:5] == ["stages", "parameters", "gradients", "optimizer", "activations"]
    assert first.split() == ["0,1", "2", "KiB", "1", "KiB", "4", "KiB", "0", "B", "3.5", "KiB"]
    assert last.split()[0] == "2" and memory_lines([]) == []


def test_memory_of_stages_of_one_rank_adds_up() -> None:
    rows = [StageMemory(i, i % 2, str(i % 2), 1024, 1024, 512 * (i + 1), 2560 + 512 * i, 0) for i in range(4)]
    _, first, second = memory_lines(rows)
    assert first.split() == ["0,2", "2", "KiB", "2", "KiB", "0", "B", "2", "KiB", "6", "KiB"]
    assert second.split()[0] == "1,3" and second.split()[-2:] == ["7", "KiB"]


def test_classes_of_equal_stages_share_a_line() -> None:
    _, first, second = class_lines(PROFILE)
    assert first.split()[:9] == ["all_reduce", "forward", "tp", "0,1", "8", "(0-7)", "8", "3", "MiB"]
    assert "F of its stage, each micro-batch" in first and "h.*.mlp m.py:3" in first and "1.5 GiB" in first
    assert "F of stage 0, each micro-batch (0 to 4 of 8)" in second


def test_show(tmp_path: Path) -> None:
    console = _Text()
    show_profile(PROFILE, None, console)
    assert console.text == ""
    show_profile(PROFILE, ProfileOutput(), console)
    assert console.text.splitlines() == class_lines(PROFILE)
    show_profile(PROFILE, ProfileOutput(str(tmp_path / "p.json")), console)
    assert json.loads((tmp_path / "p.json").read_text()) == DATA


def test_an_old_program_has_no_profile() -> None:
    with pytest.raises(NnscalerError, match="no communication profile"):
        show_profile(None, ProfileOutput(), _Text())


def test_a_path_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "program"
    code = main(["compile", "no_such_model.py", "--out", str(out), "--comm-profile", f"json={tmp_path}"])
    assert code == 2 and "it is a folder" in capsys.readouterr().err and not out.exists()


def test_compile_writes_the_profile_of_the_manifest(
    tmp_path: Path, examples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "program", tmp_path / "new" / "profile.json"
    arguments = ["compile", str(examples / "gpt.py"), "--ranks", "2", "--plan", "tp=2", "--out", str(out)]
    assert main([*arguments, "--comm-profile", f"json={file}"]) == 0
    assert json.loads(file.read_text()) == json.loads((out / "manifest.json").read_text())["communication_profile"]
    capsys.readouterr()
