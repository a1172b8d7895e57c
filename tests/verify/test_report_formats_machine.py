"""The formats for machines: valid documents, nothing lost, and never a pass that is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import torch

from op_registry.source_location import SourceLocation

import verify
from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.report_formats.junit import case_names
from verify.results.finding_codes import CODES

REPOSITORY = Path(__file__).parents[2]
SCHEMA = json.loads((REPOSITORY / "docs" / "reports" / "report.schema.json").read_text(encoding="utf-8"))
LINE_SCHEMA = {"$ref": "#/$defs/line", "$defs": SCHEMA["$defs"]}
NASTY = "\x1b[31m <&\"'> ]]> \u2028 \x00 \x85 \ud800 é\r\nnext"

WRONG = Report(
    "verify-op",
    "my_op",
    "`m k, k n -> m n`",
    3,
    (
        Check("split `m`", Verdict.PROVED_ALL_SIZES, 9, 0, 0.01, "proof of 2 obligations"),
        Check("split `k`", Verdict.REFUTED, 4, 1, 0.02),
        Check("derivative", Verdict.INCONCLUSIVE, 0, detail=NASTY),
    ),
    (
        Finding(
            "annotation_wrong",
            "output 0 is wrong when `k` is split",
            SourceLocation(str(REPOSITORY / "my ops.py"), 7, '@register_op("m k, k n -> m n")'),
            {"annotation": "m k, k n -> m n", "identifier": "k"},
            "cause",
            "help",
            "nnscaler reproduce nns1:xyz",
            (("defined here", SourceLocation("/elsewhere/lib.py", 9, "def f():")),),
        ),
        Finding("mutant_survived", NASTY, None, {"check": "derivative"}),
    ),
    (NASTY,),
    {"nnscaler": "0.1.0", "torch": "2.13.0"},
    0.5,
)
RIGHT = Report(
    "verify-op", "right", "", 3, (Check("split `a`", Verdict.TESTED_EXACT, 5),), environment=WRONG.environment
)
OPEN = Report("verify-op", "open", "", 3, (Check("whole operator", Verdict.INCONCLUSIVE, 0, detail="no inputs"),))
EMPTY = Report("verify-op", "empty", "", 3, ())
NOTHING = Report("verify-op", "nothing", "", 3, (Check("split `a`", Verdict.TESTED_EXACT, 0),))
SEQUENCES: dict[str, Sequence[Report]] = {
    "none": [],
    "wrong": [WRONG],
    "right": [RIGHT],
    "open": [OPEN],
    "empty": [EMPTY],
    "nothing": [NOTHING],
    "all": [RIGHT, OPEN, WRONG, EMPTY, NOTHING, replace(WRONG, subject="other")],
}
each = pytest.mark.parametrize("reports", SEQUENCES.values(), ids=SEQUENCES.keys())


def text(name: str, reports: Sequence[Report], seconds: float = 0.0) -> str:
    """As the command writes it to a file."""
    lines = "".join(line.text + "\n" for line in FORMATS[name](reports, seconds))
    return lines.encode("utf-8", "backslashreplace").decode("utf-8")


def verified(reports: Sequence[Report]) -> bool:
    return bool(reports) and all(report.exit_code == 0 for report in reports)


def real_reports() -> list[Report]:
    right = verify.verify_op(lambda a, b: a @ b, annotation="m k+, k+ n -> m n")
    wrong = verify.verify_op(lambda x: torch.softmax(x, -1), annotation="a b -> a b")
    return [right, wrong]


@each
def test_json_follows_its_schema(reports: Sequence[Report]) -> None:
    document = json.loads(text("json", reports, 2.0))
    jsonschema.validate(document, SCHEMA)
    assert (document["verdict"] == "VERIFIED") is (document["exit_code"] == 0) is verified(reports)
    if len(reports) != 1:
        assert [report["subject"] for report in document["reports"]] == [report.subject for report in reports]
        assert document["seconds"] == 2.0
        assert document["counts"]["checks"] == sum(report.total for report in reports)
        assert sum(document["counts"]["verdicts"].values()) == len(reports)


def test_one_report_is_the_document_of_always() -> None:
    document = json.loads(text("json", [RIGHT]))
    assert document == json.loads(RIGHT.to_json())
    assert document["counts"] == {"checks": 5, "refuted": 0} and document["seed"] == 3
    finding = json.loads(text("json", [WRONG]))["findings"][0]
    assert finding["code"] == "annotation_wrong" and finding["where"]["line"] == 7
    assert finding["related"][0]["line"] == 9 and finding["counter_example"]["identifier"] == "k"


@pytest.mark.long
def test_real_reports_follow_the_schemas() -> None:
    reports = real_reports()
    assert [report.verdict.word for report in reports] == ["VERIFIED", "REFUTED"]
    for chosen in (reports, reports[:1], reports[1:]):
        jsonschema.validate(json.loads(text("json", chosen)), SCHEMA)
        for line in text("jsonl", chosen).splitlines():
            jsonschema.validate(json.loads(line), LINE_SCHEMA)
        check_sarif(json.loads(text("sarif", chosen)))
        ElementTree.fromstring(text("junit", chosen))


@pytest.mark.parametrize("key", ["verdict", "level", "checks", "findings", "schema_version"])
def test_the_schema_refuses_a_document_without(key: str) -> None:
    document = json.loads(text("json", [WRONG]))
    del document[key]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_the_schema_refuses_another_verdict() -> None:
    document = json.loads(text("json", [WRONG]))
    document["checks"][0]["verdict"] = "PASSED"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


@each
def test_json_lines(reports: Sequence[Report]) -> None:
    lines = text("jsonl", reports).split("\n")
    assert lines.pop() == ""
    records = [json.loads(line) for line in lines]
    for record in records:
        jsonschema.validate(record, LINE_SCHEMA)
    kinds = [record["type"] for record in records]
    assert kinds[-1] == "verdict" and kinds.count("verdict") == 1
    assert kinds.count("check") == sum(len(report.checks) for report in reports)
    assert kinds.count("finding") == sum(len(report.findings) for report in reports)
    assert kinds.count("note") == sum(len(report.notes) for report in reports)
    assert (records[-1]["exit_code"] == 0) is verified(reports)


@each
def test_junit(reports: Sequence[Report]) -> None:
    root = ElementTree.fromstring(text("junit", reports))
    bad = len(root.findall(".//failure")) + len(root.findall(".//error"))
    assert (bad == 0) is verified(reports)
    for element in [root, *root.findall("testsuite")]:
        kinds = [("testcase", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")]
        for kind, name in kinds[: 3 if element is root else 4]:
            assert int(element.attrib[name]) == len(element.findall(f".//{kind}"))
    for suite in root.findall("testsuite"):
        names = [(case.attrib["classname"], case.attrib["name"]) for case in suite.findall("testcase")]
        assert len(set(names)) == len(names) > 0


def test_junit_in_detail() -> None:
    (suite,) = ElementTree.fromstring(text("junit", [WRONG])).findall("testsuite")
    properties = {item.attrib["name"]: item.attrib["value"] for item in suite.findall("properties/property")}
    assert properties["seed"] == "3" and properties["torch"] == "2.13.0" and properties["nnscaler"] == "0.1.0"
    passed, failed, undecided = suite.findall("testcase")
    assert passed.attrib == {"classname": "verify-op.my_op", "name": "split `m`", "time": "0.010"} and not list(passed)
    (failure,) = failed
    assert failure.tag == "failure" and failure.attrib["type"] == "annotation_wrong"
    assert failure.attrib["message"] == "output 0 is wrong when `k` is split"
    assert failure.text and "nnscaler reproduce nns1:xyz" in failure.text and "^  ^" in failure.text
    (error,) = undecided
    assert error.tag == "error" and error.attrib["type"] == "mutant_survived"
    assert "\n" not in error.attrib["message"] and error.attrib["message"].startswith("\\x1b[31m <&\"'> ]]> ")
    assert error.text and "annotation_wrong" not in error.text and "\\x00" in error.text and "\\ud800" in error.text


def test_a_check_that_compares_nothing_is_skipped_beside_others_only() -> None:
    mixed = replace(RIGHT, checks=(*RIGHT.checks, Check("buffers", Verdict.TESTED_EXACT, 0)))
    root = ElementTree.fromstring(text("junit", [mixed]))
    assert (root[0].attrib["skipped"], root.attrib["errors"]) == ("1", "0")
    root = ElementTree.fromstring(text("junit", [NOTHING]))
    assert root.attrib["errors"] == "1"


def test_names_of_cases_are_unique_and_stable() -> None:
    checks = [Check(name, Verdict.TESTED_EXACT, 1) for name in ("a", "a", "", "b", "a")]
    assert case_names(checks) == ["a", "a (2)", "verdict", "b", "a (3)"]


# The fields that the SARIF 2.1.0 schema requires, and the values it allows, of what is written here.
SARIF_REQUIRED: dict[str, Sequence[str]] = {
    "log": ("version", "runs"),
    "run": ("tool",),
    "tool": ("driver",),
    "driver": ("name",),
    "rule": ("id",),
    "invocation": ("executionSuccessful",),
    "result": ("message",),
    "message": ("text",),
}
LEVELS = ("none", "note", "warning", "error")


def required(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    assert set(SARIF_REQUIRED[kind]) <= set(value), (kind, value)
    return value


def check_sarif(log: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a log that is as SARIF 2.1.0 wants it."""
    required("log", log)
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = required("driver", required("tool", required("run", run)["tool"])["driver"])
    rules = [required("rule", rule)["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules) and set(rules) <= set(CODES)
    for invocation in run["invocations"]:
        assert isinstance(required("invocation", invocation)["executionSuccessful"], bool)
    for result in run["results"]:
        required("message", required("result", result)["message"])
        assert rules[result["ruleIndex"]] == result["ruleId"] and result["level"] in LEVELS
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
        for location in [*result["locations"], *result.get("relatedLocations", [])]:
            physical = location.get("physicalLocation")
            if physical is None:
                assert location["logicalLocations"]
                continue
            artifact = physical["artifactLocation"]
            if "uriBaseId" in artifact:
                assert artifact["uriBaseId"] in run["originalUriBaseIds"]
                assert not artifact["uri"].startswith(("/", "file:", ".."))
            else:
                assert artifact["uri"].startswith("file:///")
            assert physical["region"]["startLine"] >= 1
    return list(run["results"])


@each
def test_sarif(reports: Sequence[Report]) -> None:
    results = check_sarif(json.loads(text("sarif", reports)))
    assert (not results) is verified(reports)
    prints = [result["partialFingerprints"]["nnscaler/v1"] for result in results]
    assert len(set(prints)) == len(prints)


def test_sarif_in_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    log = json.loads(text("sarif", [WRONG]))
    first, second = check_sarif(log)
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "my%20ops.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"]["startLine"] == 7
    assert first["level"] == "error" and second["level"] == "warning"
    assert first["relatedLocations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/lib.py"}
    assert log["runs"][0]["invocations"][0]["exitCode"] == 1
    (undecided,) = check_sarif(json.loads(text("sarif", [OPEN])))
    assert undecided["level"] == "warning" and "no inputs" in undecided["message"]["text"]


def test_fingerprints_stay_the_same() -> None:
    def prints(report: Report) -> list[str]:
        results = json.loads(text("sarif", [RIGHT, report]))["runs"][0]["results"]
        return [result["partialFingerprints"]["nnscaler/v1"] for result in results]

    finding = WRONG.findings[0]
    assert finding.where is not None
    moved = replace(finding, where=replace(finding.where, line=90), message="output 0 is wrong by 7.5")
    assert prints(replace(WRONG, seed=9, findings=(moved, *WRONG.findings[1:]))) == prints(WRONG)
    other = replace(finding, counter_example={"identifier": "m"})
    assert prints(replace(WRONG, findings=(other,)))[0] not in prints(WRONG)
    assert len(set(prints(replace(WRONG, findings=(finding, finding))))) == 2
