"""SARIF and JUnit follow the schemas that their readers use, which are in `tests/data`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from op_registry.source_location import SourceLocation

from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.results.finding_codes import CODES
from verify.results.report import plain_json
from verify.results.typed_attachments import Attachments, ComparedTensor

DATA = Path(__file__).parents[1] / "data"
SARIF = json.loads((DATA / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
XS = "{http://www.w3.org/2001/XMLSchema}"
XSD = ElementTree.parse(DATA / "junit-10.xsd").getroot()

EVERY = Report(
    "verify-plan",
    "model.py",
    "on 8 ranks (dp=2)",
    0,
    (
        *(Check(f"check {v.value}", v, 3, int(v is Verdict.REFUTED), 1234.5) for v in Verdict),
        Check("buffers", Verdict.TESTED_EXACT, 0),
    ),
    tuple(
        Finding(
            code,
            f"\x00 <{code}> \ud800",
            SourceLocation("model.py", 0, "x = y"),
            {"step": "0"},
            "cause",
            "help",
            "nnscaler reproduce nns2:abc",
            (("generated program", SourceLocation("/elsewhere/role 0.py", 3, "z")),),
        )
        for code in CODES
    ),
    ("note \x1b",),
    {"nnscaler": "0.1.0"},
    2.5,
)
PASS = Report("verify-op", "op", "", 0, (Check("split", Verdict.PROVED_ALL_SIZES, 3),))
SEQUENCES: dict[str, Sequence[Report]] = {"none": [], "pass": [PASS], "every": [EVERY], "both": [PASS, EVERY, EVERY]}
each = pytest.mark.parametrize("reports", SEQUENCES.values(), ids=SEQUENCES.keys())


def text(name: str, reports: Sequence[Report]) -> str:
    lines = "".join(line.text + "\n" for line in FORMATS[name](reports, 3.0))
    return lines.encode("utf-8", "backslashreplace").decode("utf-8")


@each
def test_sarif_follows_the_schema(reports: Sequence[Report]) -> None:
    jsonschema.Draft4Validator(SARIF).validate(json.loads(text("sarif", reports)))


@pytest.mark.parametrize("wrong", ["level", "message", "extra"])
def test_the_sarif_schema_refuses(wrong: str) -> None:
    log = json.loads(text("sarif", [EVERY]))
    result = log["runs"][0]["results"][0]
    if wrong == "message":
        del result["message"]
    else:
        result[wrong] = "fatal"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SARIF).validate(log)


def test_a_sarif_rule_explains_its_code() -> None:
    rules = json.loads(text("sarif", [EVERY]))["runs"][0]["tool"]["driver"]["rules"]
    assert sorted(rule["id"] for rule in rules) == sorted(CODES)
    for rule in rules:
        assert rule["shortDescription"]["text"] == CODES[rule["id"]]
        assert len(rule["fullDescription"]["text"]) > 80
        assert rule["help"]["markdown"].startswith(f"# {rule['id']}\n") and "## What to do" in rule["help"]["text"]


def declaration(name: str) -> ElementTree.Element:
    found = XSD.find(f"{XS}element[@name='{name}']")
    assert found is not None, f"the schema has no <{name}>"
    return found


def type_of(element: ElementTree.Element) -> ElementTree.Element | None:
    inner = element.find(f"{XS}complexType")
    return inner if inner is not None else XSD.find(f"{XS}complexType[@name='{element.get('type')}']")


def problems(element: ElementTree.Element) -> list[str]:
    """Return the violations of the schema in attributes, child elements and text. It fixes no order."""
    kind = type_of(declaration(element.tag))
    if kind is None:  # of the type xs:string
        return [f"<{element.tag}> has parts"] if element.attrib or len(element) else []
    known = {a.get("name"): a for a in kind.findall(f"{XS}attribute")}
    found = [f"<{element.tag} {name}> is unknown" for name in element.attrib if name not in known]
    found += [
        f"<{element.tag}> lacks {n}" for n, a in known.items() if a.get("use") == "required" and n not in element.attrib
    ]
    pattern = XSD.find(f".//{XS}pattern")
    assert pattern is not None
    for name, value in element.attrib.items():
        if (
            name in known
            and known[name].get("type") == "SUREFIRE_TIME"
            and not re.fullmatch(pattern.attrib["value"], value)
        ):
            found.append(f"{name}={value} is no time")
    children = {child.get("ref") or child.get("name") for child in kind.iter(f"{XS}element")}
    found += [f"<{element.tag}> has <{child.tag}>" for child in element if child.tag not in children]
    if kind.get("mixed") != "true" and (element.text or "").strip():
        found.append(f"<{element.tag}> has text")
    return found + [problem for child in element for problem in problems(child)]


@each
def test_junit_follows_the_schema(reports: Sequence[Report]) -> None:
    root = ElementTree.fromstring(text("junit", reports))
    assert root.tag == "testsuites" and not problems(root)


@pytest.mark.parametrize(
    "wrong",
    [
        '<testsuites skipped="1"/>',
        '<testsuites><testsuite name="a" tests="1" failures="0"/></testsuites>',
        '<testsuites time="fast"/>',
        '<testsuites><testcase name="a"/></testsuites>',
        "<testsuites>text</testsuites>",
    ],
)
def test_the_junit_schema_refuses(wrong: str) -> None:
    assert problems(ElementTree.fromstring(wrong))


def test_attachments_are_json_and_follow_the_schema() -> None:
    schema = json.loads((DATA.parents[1] / "docs/reports/report.schema.json").read_text(encoding="utf-8"))
    row = ComparedTensor("gradient", 0, "w", math.nan, math.inf, Verdict.REFUTED)
    report = Report("verify-plan", "m", "", 0, PASS.checks, attachments=Attachments(tensors=(row,)))
    document = json.loads(text("json", [report]))
    jsonschema.validate(document, schema)
    assert document["attachments"] == {
        "tensors": [
            {"kind": "gradient", "step": 0, "name": "w", "error": "nan", "allowed": "inf", "verdict": "REFUTED"}
        ]
    }
    assert plain_json({1: (2, SourceLocation("f", 1, ""))}) == {"1": [2, "f:1"]}
    document["attachments"]["tensors"] = [{"kind": "loss"}]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)
