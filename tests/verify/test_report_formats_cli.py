"""GitHub's commands, the summary of a step, and where the command line puts each format."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from op_registry.source_location import SourceLocation

from nnscaler.cli.main import main
from nnscaler.cli.options import MACHINE_FORMATS, TEXT_FORMATS, OutputFormat, add_report_options
from nnscaler.cli.output.print_reports import destinations
from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.report_formats.github import BYTES, step_summary

OPS = """
import nnscaler, torch

@nnscaler.register_op("m k+, k+ n -> m n", name="{name}_right")
def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b

@nnscaler.register_op("a b -> a b", name="{name}_wrong")
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)
"""


def finding(number: int = 0, code: str = "annotation_wrong") -> Finding:
    return Finding(code, f"finding {number}: 100%", SourceLocation(os.path.abspath("a,b.py"), 7), {"identifier": "k"})


def report(*findings: Finding, verdict: Verdict = Verdict.REFUTED) -> Report:
    return Report("verify-op", "my_op", "", 0, (Check("split `k`", verdict, 4, int(not verdict.passes)),), findings)


def github(*reports: Report) -> list[str]:
    return [line.text for line in FORMATS["github"](reports)]


def test_a_command_of_github() -> None:
    command, last = github(report(finding()))
    assert command == (
        "::error title=nnscaler (annotation_wrong),file=a%2Cb.py,line=7::"
        "finding 0: 100%25%0A  --> " + os.path.abspath("a,b.py") + ":7%0A  = counter-example: identifier=k"
    )
    assert last.startswith("REFUTED  my_op")


def test_the_worst_come_first_and_ten_at_most() -> None:
    warnings = [report(finding(n), verdict=Verdict.INCONCLUSIVE) for n in range(8)]
    lines = github(*warnings, report(*(finding(n) for n in range(7))))
    assert [line.split()[0] for line in lines[:10]] == ["::error"] * 7 + ["::warning"] * 3
    assert lines[10] == "5 more findings are in the summary of the step"
    assert not any(line.startswith("::") for line in lines[10:])


def test_a_file_elsewhere_is_named_in_the_text_only() -> None:
    (command, _) = github(report(replace(finding(), where=SourceLocation("/elsewhere/x.py", 3))))
    assert command.startswith("::error title=nnscaler (annotation_wrong)::") and "/elsewhere/x.py:3" in command


def test_nothing_verified_is_a_warning() -> None:
    assert github()[0].startswith("::warning title=nnscaler (nothing_checked)::")


def test_summary_of_a_step() -> None:
    nasty = replace(finding(), message="<b>a|b</b> ```", help="```\n# no heading")
    text = step_summary([report(verdict=Verdict.PROVED_ALL_SIZES), replace(report(nasty), subject="a|`b`")], 2.5)
    lines = text.splitlines()
    assert lines[0] == "### nnscaler verify-op: REFUTED"
    assert lines[2] == "2 operators: 8 checks, 1 refuted, 2.5 s (seed 0); 1 PROVED (all sizes), 1 REFUTED"
    assert lines[6] == "| a\\|\\`b\\` | REFUTED | 4 | 1 |"
    assert "<summary><b>error</b> annotation_wrong: &lt;b&gt;a|b&lt;/b&gt; ```</summary>" in lines
    assert lines.count("````") == 1 and lines.count("````text") == 1
    single = step_summary([report(verdict=Verdict.PROVED_BOUNDED)])
    assert "| split \\`k\\` | PROVED (bounded) | 4 | 0 |" in single.splitlines()
    assert "INCONCLUSIVE" in step_summary([])


def test_a_summary_is_never_too_long() -> None:
    text = step_summary([report(*(replace(finding(n), help="é" * 100_000) for n in range(50)))])
    assert BYTES < len(text.encode()) < 1024 * 1024


def test_every_format_can_be_asked_for() -> None:
    assert set(FORMATS) == {*TEXT_FORMATS, *MACHINE_FORMATS}


def parse(*arguments: str) -> tuple[OutputFormat, ...]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_report_options(parser)
    return tuple(parser.parse_args([f"--output-format={text}" for text in arguments]).output_format)


def test_options_of_formats() -> None:
    assert parse() == ()
    assert parse("junit=a.xml", "full") == (OutputFormat("junit", "a.xml"), OutputFormat("full"))
    assert parse("github", "concise") == (OutputFormat("github"), OutputFormat("concise"))
    for wrong in (
        ["xml"],
        ["json="],
        ["json", "junit"],
        ["full", "json"],
        ["full", "concise"],
        ["full", "full"],
        ["json=x", "junit=x"],
        ["json=x", "junit=./x"],
    ):
        with pytest.raises(argparse.ArgumentError):
            parse(*wrong)


def test_where_formats_go() -> None:
    actions = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "s.md"}
    junit = OutputFormat("junit", "r.xml")
    assert destinations((), {}).stdout == ("full",)
    assert destinations((junit,), {}).stdout == ("full",)
    assert destinations((junit,), {}).files == (("junit", "r.xml"),)
    assert destinations((OutputFormat("json"), junit), {}).stdout == ("json",)
    assert destinations((), actions).stdout == ("full", "github") and destinations((), actions).summary == "s.md"
    assert destinations((junit,), actions).stdout == ("full",) and destinations((junit,), actions).summary is None
    chosen = destinations((OutputFormat("github"), OutputFormat("full")), {**actions, "GITHUB_ACTIONS": "false"})
    assert chosen.stdout == ("full", "github") and chosen.summary == "s.md"
    assert destinations((OutputFormat("github"),), {"GITHUB_STEP_SUMMARY": ""}).summary is None


@pytest.fixture
def ops(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "my_ops.py").write_text(OPS.format(name=request.node.name))
    monkeypatch.chdir(tmp_path)
    return "my_ops.py"


@pytest.mark.long
def test_several_formats_at_once(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"json": "r.json", "junit": "r.xml", "sarif": "r.sarif", "jsonl": "r.jsonl", "concise": "r.txt"}
    arguments = [f"--output-format={name}={path}" for name, path in names.items()]
    assert main(["verify-op", f"{ops}::wrong", "-q", *arguments]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("REFUTED  ")
    assert json.loads(Path("r.json").read_text())["verdict"] == "REFUTED"
    assert ElementTree.parse("r.xml").getroot().attrib["failures"] != "0"
    result = json.loads(Path("r.sarif").read_text())["runs"][0]["results"][0]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my_ops.py"
    assert json.loads(Path("r.jsonl").read_text().splitlines()[-1])["type"] == "verdict"
    assert Path("r.txt").read_text().splitlines()[-1].startswith("REFUTED  ")


@pytest.mark.long
def test_a_machine_format_has_the_screen_alone(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", f"{ops}::right", "--output-format", "json", "--output-format", "junit=r.xml"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "VERIFIED"
    assert ElementTree.parse("r.xml").getroot().attrib["failures"] == "0"


@pytest.mark.long
def test_in_github_actions(ops: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("before\n")
    assert main(["verify-op", f"{ops}::wrong"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(("PASS", "FAIL", "OPEN"))
    assert sum(line.startswith("::error title=nnscaler (annotation_wrong),file=my_ops.py,line=") for line in out) >= 1
    assert Path("summary.md").read_text().startswith("before\n### nnscaler verify-op: REFUTED\n")


def test_a_file_that_cannot_be_written_is_no_verdict(ops: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    arguments = ["--output-format", "json=folder", "--output-format", "junit=r.xml"]
    assert main(["verify-op", f"{ops}::right", *arguments]) == 2
    captured = capsys.readouterr()
    assert "cannot write folder: it is a folder" in captured.err and not captured.out
    assert not Path("r.xml").exists()  # nothing was run
