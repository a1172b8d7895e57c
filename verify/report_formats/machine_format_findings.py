"""The findings that a machine format must show, each with its report, its severity and a stable fingerprint.

A report that does not pass has at least one: a format that shows only findings must never look clean beside a verdict
that is not.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from verify.results.finding import Finding
from verify.results.finding_codes import UNDECIDED
from verify.results.report import Check, Report
from verify.results.verdict import Verdict

# Paths in machine formats: relative to the current directory, with `/`, as code hosts want them.


def relative(file: str) -> str | None:
    """Return `file` relative to the current directory; None where it lies outside, or names no file ("<stdin>")."""
    if not file or file.startswith("<"):
        return None
    path = Path(os.path.abspath(file))
    for base in (Path.cwd(), Path.cwd().resolve()):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        if path.resolve().is_relative_to(base):  # a link to the same folder, as /tmp is on some systems
            return path.resolve().relative_to(base).as_posix()
    return None


def as_uri(file: str) -> str:
    """Return `file:///...` for a file that is outside the current directory."""
    return PurePath(os.path.abspath(file)).as_uri()


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class ReportedFinding:
    """A finding and the report it is from.

    `fingerprint` is the same in each run that finds the same, whatever the seed and the line number; two findings of
    one run never share it.
    """

    report: Report
    finding: Finding
    severity: Severity
    fingerprint: str


def problems(reports: Sequence[Report]) -> list[ReportedFinding]:
    """Return every problem, errors before warnings, else in the order of the reports. No reports are a problem too."""
    seen: Counter[str] = Counter()
    found: list[ReportedFinding] = []
    for report in reports or [Report("nnscaler", "nothing", "", 0, ())]:
        for finding in findings_of(report):
            key = _key(report, finding)
            seen[key] += 1
            digest = hashlib.sha256(f"{key}\0{seen[key]}".encode("utf-8", "backslashreplace")).hexdigest()[:32]
            found.append(ReportedFinding(report, finding, _severity(report, finding), digest))
    return sorted(found, key=lambda problem: problem.severity != "error")


def findings_of(report: Report) -> tuple[Finding, ...]:
    """Return the report's findings; where it does not pass and has none, one that names the checks which do not."""
    if report.findings or report.verdict.passes:
        return report.findings
    failing = [check for check in report.checks if not check.verdict.passes]
    texts = [f"{check.name}: {check.verdict}" + (f", {check.detail}" if check.detail else "") for check in failing]
    return (Finding("nothing_checked", f"`{report.subject}` was not verified: {'; '.join(texts) or 'no check ran'}"),)


def reproduce_once(findings: Sequence[Finding]) -> list[Finding]:
    """Keep each line that reproduces with the last of the findings that share it: it runs the same for all of them."""
    last = {finding.reproduce: number for number, finding in enumerate(findings)}
    return [
        finding if last[finding.reproduce] == number else replace(finding, reproduce=None)
        for number, finding in enumerate(findings)
    ]


def findings_by_check(report: Report) -> dict[int, list[Finding]]:
    """Index of each check that does not pass -> the findings that belong to it.

    A finding names its check by `check` or `identifier` among its facts. One that names none goes to the first check
    that does not pass, so that no finding is lost.
    """
    failing = [index for index, check in enumerate(report.checks) if not check.verdict.passes]
    found: dict[int, list[Finding]] = {index: [] for index in failing}
    for finding in findings_of(report):
        owner = next((index for index in failing if _owns(report.checks[index], finding)), None)
        if owner is not None or failing:
            found[failing[0] if owner is None else owner].append(finding)
    return found


def _owns(check: Check, finding: Finding) -> bool:
    facts = finding.counter_example
    if facts.get("check") == check.name:
        return True
    return any(f"`{name}`" in check.name or name == check.name for name in (facts.get("identifier"),) if name)


def _severity(report: Report, finding: Finding) -> Severity:
    return "warning" if report.verdict is not Verdict.REFUTED or finding.code in UNDECIDED else "error"


def _key(report: Report, finding: Finding) -> str:
    facts = finding.counter_example
    about = [facts.get(name, "") for name in ("identifier", "tensor", "parameter")]
    place = (relative(finding.where.file) or "", finding.where.text) if finding.where is not None else ("", "")
    return "\0".join([finding.code, report.tool, report.subject, *place, *about])
