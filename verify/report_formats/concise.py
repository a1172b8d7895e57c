"""One line per finding, `file:line: code message`, and the verdict line: for editors, logs and `grep`."""

from __future__ import annotations

from verify.finding import Finding
from verify.report import Report
from verify.report_formats.line import Line, last_line


def render(report: Report) -> list[Line]:
    """A line per finding, then the verdict."""
    return [*(concise_line(finding) for finding in report.findings), last_line(report)]


def concise_line(finding: Finding) -> Line:
    """`gpt.py:31: gradient_differs the gradient of ...`."""
    place = f"{finding.where}: " if finding.where is not None else ""
    return Line(((place, "faint"), (finding.code, "bad"), (f" {finding.message}", "")))
