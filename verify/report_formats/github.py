"""GitHub Actions: workflow commands that show findings beside the lines of a pull request, worst first."""

from __future__ import annotations

from collections.abc import Sequence

from verify.report_formats.concise import one_line
from verify.report_formats.finding_text import finding_lines
from verify.report_formats.problems import ReportedFinding, problems, relative
from verify.results.line import StyledLine, last_line, plain
from verify.results.report import Report

ANNOTATIONS = 10  # GitHub shows no more of one kind per step


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return a command per finding, at most ten, and the verdict."""
    found = problems(reports)
    lines = [plain(_command(problem)) for problem in found[:ANNOTATIONS]]
    if len(found) > ANNOTATIONS:
        lines.append(plain(f"{len(found) - ANNOTATIONS} more findings are in the summary of the step"))
    return [*lines, last_line(reports, seconds)]


def _command(problem: ReportedFinding) -> str:
    """`::error title=nnscaler (code),file=my_ops.py,line=12::text`."""
    finding = problem.finding
    properties = {"title": f"nnscaler ({finding.code})"}
    if finding.where is not None:
        file = relative(finding.where.file)
        if file is not None:
            properties |= {"file": file, "line": str(max(finding.where.line, 1))}
    text = "\n".join([one_line(finding.message), *(line.text for line in finding_lines(finding)[1:])])
    fields = ",".join(f"{key}={escape_property(value)}" for key, value in properties.items())
    return f"::{problem.severity} {fields}::{escape_data(text)}"


def escape_data(text: str) -> str:
    """Escape a command's text: `%`, CR and LF."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Escape a command's property: as its text, and `:` and `,`."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")
