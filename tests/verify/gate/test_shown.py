"""The summary, and known findings in machine formats."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from tests.verify.gate.results import LATER, TODAY, entry, finding, result
from verify.gate.outcome import GateOutcome, judge
from verify.gate.render_outcome import render, summary
from verify.report_formats import FORMATS
from verify.report_formats.github import cell
from verify.results.verdict import Verdict

DATA = Path(__file__).resolve().parents[2] / "data"
SCHEMA = json.loads((DATA.parents[1] / "docs" / "reports" / "report.schema.json").read_text(encoding="utf-8"))


def outcome(expired: bool = False) -> GateOutcome:
    results = [
        result("model.py ranks=2", finding()),
        result("ops|pipe.py::f_1", finding("annotation_wrong", "x")),
        result("ok"),
        result("late", finding("not_run"), verdict=Verdict.INCONCLUSIVE, finished=False),
    ]
    known = [entry("model.py ranks=2")]
    if expired:
        known.append(entry("ok", expires=TODAY))
    today = TODAY + timedelta(1) if expired else TODAY
    return judge(results, known, {r.name for r in results}, today, "baseline.toml")


def test_the_summary_says_it_all() -> None:
    text = summary(outcome(), 12.34, 120.0)
    head, counts = text.splitlines()[0], text.splitlines()[2]
    assert head == "### nnscaler gate: REFUTED"
    assert counts == (
        "4 items: 1 refuted, 1 not run, 1 known, 1 verified; 20 checks, 8 refuted; 12.3 s of 120 s (seed 0)"
    )
    assert "| ops\\|pipe.py::f\\_1 | REFUTED | REFUTED | 6 | 1.5 s |" in text
    assert "| late | NOT RUN | none | 2 | 1.5 s |" in text
    assert "| model.py ranks=2 | KNOWN | REFUTED | 6 | 1.5 s |" in text
    assert text.index("**annotation_wrong**") < text.index("**gradient_differs**"), "known ones last"
    assert "known until 2027-01-31, owner: ann@example.org (the fix is in review)" in text
    assert "reproduce: nnscaler reproduce nns2:abc" in text
    assert text.endswith("nnscaler 0.1.0, torch 2.13.0, python 3.11.7, Linux x86_64\n")


def test_the_line_that_reproduces_an_item_is_shown_once_and_not_lost_to_a_known_finding() -> None:
    two = result("model.py ranks=2", finding(), finding(tensor="other.weight"), finding("loss_differs", "x"))
    known = [entry("model.py ranks=2", message="the gradient of `layer.weight`")]
    text = summary(judge([two], known, {two.name}, TODAY, "baseline.toml"), 1.0, None)
    assert text.count("reproduce: nnscaler reproduce nns2:abc") == 1


def test_rows_are_whole_tables() -> None:
    lines = [line for line in summary(outcome(), 1.0, None).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {6}


def test_what_the_baseline_has_wrong_is_a_finding() -> None:
    text = summary(outcome(expired=True), 1.0, None)
    assert "**baseline_expired** in baseline.toml" in text
    assert "has expired on 2026-11-21" in text


def test_an_interrupt_is_told() -> None:
    stopped = replace(outcome(), interrupted=130)
    assert summary(stopped, 1.0, None).startswith("### nnscaler gate: REFUTED, interrupted\n")
    assert json.loads(render("json", stopped, 1.0))["gate"]["exit_code"] == 130
    assert json.loads(render("sarif", stopped, 1.0))["runs"][0]["invocations"][0]["exitCode"] == 130


def test_an_item_without_findings_says_why() -> None:
    open_ = judge([result("a", verdict=Verdict.INCONCLUSIVE)], [], {"a"}, TODAY, "")
    assert "was not verified" in summary(open_, 1.0, None)


def test_long_lines_are_cut_and_counted() -> None:
    long = judge([result("a", finding(tensor="w" * 5000))], [], {"a"}, TODAY, "")
    assert max(map(len, summary(long, 1.0, None).splitlines())) < 2100
    assert "characters: see the full report" in summary(long, 1.0, None)


def test_cells_are_plain() -> None:
    assert cell("a | b\n<x> `c` *d*") == "a \\| b &lt;x&gt; \\`c\\` \\*d\\*"


def test_sarif_suppresses_what_is_known() -> None:
    log = json.loads(render("sarif", outcome(), 1.0))
    jsonschema.validate(log, json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8")))
    suppressed = [r["message"]["text"] for r in log["runs"][0]["results"] if "suppressions" in r]
    assert len(suppressed) == 1 and "layer.weight" in suppressed[0]
    assert log["runs"][0]["invocations"][0]["exitCode"] == 1


def test_junit_skips_what_is_known_and_nothing_else() -> None:
    root = ElementTree.fromstring(render("junit", outcome(), 1.0))
    by_name = {suite.get("name"): suite for suite in root.iter("testsuite")}
    known = by_name["model.py ranks=2"]
    assert (known.get("failures"), known.get("errors"), known.get("skipped")) == ("0", "0", "1")
    (skipped,) = known.iter("skipped")
    assert skipped.get("message") == (
        "gradient_differs, known until 2027-01-31, owner: ann@example.org (the fix is in review)"
    )
    assert by_name["ops|pipe.py::f_1"].get("failures") == "1"
    assert by_name["late"].get("errors") == "1"
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("8", "1", "1")


def test_json_names_what_is_known() -> None:
    document = json.loads(render("json", outcome(), 1.0))
    jsonschema.validate(document, SCHEMA)
    assert document["gate"]["exit_code"] == 1
    assert document["gate"]["known"] == [
        {
            "item": "model.py ranks=2",
            "code": "gradient_differs",
            "owner": "ann@example.org",
            "expires": LATER.isoformat(),
            "reason": "the fix is in review",
        }
    ]
    assert [i["verdict"] for i in document["gate"]["items"]] == ["REFUTED", "NOT RUN", "KNOWN", "VERIFIED"]


@pytest.mark.parametrize("stop", [0, 2, 101])
def test_json_says_what_the_gate_ends_with(stop: int) -> None:
    """The fields beside `gate` are those of every report, and have no code for an item that could not be run."""
    results = [result("a"), result("b", finding("could_not_run"), stop=stop, verdict=Verdict.INCONCLUSIVE)]
    judged = judge(results, [], {"a", "b"}, TODAY, "")
    text = render("jsonl", judged, 1.0)
    for line in map(json.loads, text.splitlines()):
        jsonschema.validate(line, {**SCHEMA, "oneOf": [{"$ref": "#/$defs/line"}]})
    document, last = json.loads(render("json", judged, 1.0)), json.loads(text.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    assert document["exit_code"] == last["exit_code"] == 3
    assert document["gate"] == last["gate"] and last["gate"]["exit_code"] == judged.exit_code == (stop or 3)
    wrong = {**document, "gate": {**document["gate"], "exit_code": 3.5}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_github_tells_known_findings_as_notices() -> None:
    lines = render("github", outcome(), 1.0).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::notice", "::error", "::warning", "REFUTED"]
    known = judge([result("a", finding())], [entry("a")], {"a"}, TODAY, "")
    assert [line.partition(" ")[0] for line in render("github", known, 1.0).splitlines()] == ["::notice"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_ends_with_an_end_of_line(name: str) -> None:
    assert render(name, outcome(), 1.0).endswith("\n")
