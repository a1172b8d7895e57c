"""SARIF 2.1.0, for code scanning: a result per finding, the rules from the catalogue of codes.

Paths are relative to the current directory and fingerprints do not depend on line numbers, so that a host sees the
same alert again in the next run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from op_registry.source_location import SourceLocation

from verify.report_formats.finding_text import finding_lines
from verify.report_formats.machine_format_findings import ReportedFinding, as_uri, problems, relative
from verify.results.finding_codes import CODES, page, section
from verify.results.report import Report, Totals, totals
from verify.results.styled_line import StyledLine, plain_lines

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "%SRCROOT%"


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return the log with its one run."""
    found = problems(reports)
    codes = list(dict.fromkeys(problem.finding.code for problem in found))
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(found, codes, totals(reports, seconds))]}
    return plain_lines(json.dumps(log, indent=2, ensure_ascii=False))


def _run(found: Sequence[ReportedFinding], codes: Sequence[str], total: Totals) -> dict[str, Any]:
    driver: dict[str, Any] = {"name": "nnscaler", "rules": [_rule(code) for code in codes]}
    if "nnscaler" in total.environment:
        driver["version"] = total.environment["nnscaler"]
    return {
        "tool": {"driver": driver},
        "originalUriBaseIds": {BASE: {"description": {"text": "The directory in which nnscaler ran."}}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": total.verdict.exit_code,
                "exitCodeDescription": total.verdict.word,
            }
        ],
        "results": [_result(problem, codes.index(problem.finding.code)) for problem in found],
        "properties": {
            "tool": total.tool,
            "verdict": total.verdict.word,
            "level": total.verdict.value,
            "checks": total.checks,
            "seed": total.seed,
            "seconds": round(total.seconds, 3),
            "environment": dict(total.environment),
        },
    }


def _rule(code: str) -> dict[str, Any]:
    """Return the rule of a code: its sentence, what it means, and its page as the help that a host shows beside an
    alert."""
    text = CODES.get(code, code)
    name = "".join(word.capitalize() for word in code.split("_"))
    rule: dict[str, Any] = {"id": code, "name": name, "shortDescription": {"text": text}}
    if code not in CODES:
        return {**rule, "fullDescription": {"text": text}}
    whole = page(code)
    rule["fullDescription"] = {"text": section(code, "What it means")}
    rule["help"] = {"text": whole, "markdown": whole}
    return rule


def _result(problem: ReportedFinding, rule: int) -> dict[str, Any]:
    finding, report = problem.finding, problem.report
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": report.subject}]}
    place = finding.where or next((place for _, place in finding.related), None)
    if place is not None:
        location["physicalLocation"] = _physical(place)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": problem.severity,
        "message": {"text": "\n".join([finding.message, *(line.text for line in finding_lines(finding)[1:])])},
        "locations": [location],
        "partialFingerprints": {"nnscaler/v1": problem.fingerprint},
    }
    if finding.related:
        result["relatedLocations"] = [
            {"id": number, "message": {"text": what}, "physicalLocation": _physical(place)}
            for number, (what, place) in enumerate(finding.related, 1)
        ]
    properties = {**finding.counter_example, "tool": report.tool, "subject": report.subject, "seed": str(report.seed)}
    if finding.reproduce:
        properties["reproduce"] = finding.reproduce
    return {**result, "properties": properties}


def _physical(place: SourceLocation) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(place.line, 1)}
    if place.text:
        region["snippet"] = {"text": place.text}
    inside = relative(place.file)
    artifact = {"uri": quote(inside), "uriBaseId": BASE} if inside is not None else {"uri": as_uri(place.file)}
    return {"artifactLocation": artifact, "region": region}
