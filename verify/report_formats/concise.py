"""One line per finding, `file:line: code message`, and the verdict line: for editors, logs and `grep`."""

from __future__ import annotations

from collections.abc import Sequence

from verify.report_formats.machine_format_findings import problems
from verify.results.finding import Finding
from verify.results.report import Report
from verify.results.styled_line import StyledLine, last_line


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return a line per finding, then the verdict."""
    return [*(concise_line(problem.finding) for problem in problems(reports)), last_line(reports, seconds)]


def concise_line(finding: Finding) -> StyledLine:
    """`gpt.py:31: gradient_differs the gradient of ...`."""
    place = f"{finding.where}: " if finding.where is not None else ""
    return StyledLine(((place, "faint"), (finding.code, "bad"), (f" {one_line(finding.message)}", "")))


def one_line(text: str) -> str:
    """Return the text with each run of white space, ends of lines among it, as one space."""
    return " ".join(text.split())
