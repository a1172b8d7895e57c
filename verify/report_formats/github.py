"""GitHub Actions: workflow commands beside the lines of a pull request, and the step summary in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verify.report_formats.finding_text import finding_lines
from verify.report_formats.full_and_concise import one_line
from verify.report_formats.machine_format_findings import ReportedFinding, problems, relative
from verify.results.report import Report, totals
from verify.results.styled_line import StyledLine, counts, last_line, plain

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


# A Markdown summary of reports, for $GITHUB_STEP_SUMMARY or a comment: verdict, a table, the worst findings.

ROWS = 100
FINDINGS = 20
BYTES = 900_000  # GitHub refuses a summary of more than 1 MiB


def step_summary(reports: Sequence[Report], seconds: float = 0.0) -> str:
    """Return the Markdown text, worst first; it ends with an end of line."""
    found = totals(reports, seconds)
    head = f"### nnscaler {found.tool}".rstrip() + f": {found.verdict.word}"
    levels = ", ".join(f"{number} {level}" for level, number in found.levels.items())
    lines = [head, "", f"{len(reports)} {found.noun}: {counts(found)}" + (f"; {levels}" if levels else ""), ""]
    lines += _table(reports)
    listed = problems(reports)
    for problem in listed[:FINDINGS]:
        lines += ["", *_details(problem)]
    if len(listed) > FINDINGS:
        lines += ["", f"{len(listed) - FINDINGS} more findings are not shown here."]
    return _cut("\n".join(lines) + "\n")


def _table(reports: Sequence[Report]) -> list[str]:
    rows = sorted(reports, key=lambda report: -report.verdict.rank)
    if len(reports) == 1:
        cells = [(check.name, check.verdict, check.count, check.refuted) for check in reports[0].checks]
        first = "check"
    else:
        cells = [(report.subject, report.verdict, report.total, report.refuted) for report in rows]
        first = "subject"
    lines = [f"| {first} | verdict | comparisons | refuted |", "|---|---|---:|---:|"]
    lines += [f"| {cell(name)} | {verdict} | {count} | {refuted} |" for name, verdict, count, refuted in cells[:ROWS]]
    if len(cells) > ROWS:
        lines.append(f"| {len(cells) - ROWS} more | | | |")
    return lines


def _details(problem: ReportedFinding) -> list[str]:
    text = "\n".join(line.text for line in finding_lines(problem.finding))
    summary = f"<b>{problem.severity}</b> {problem.finding.code}: {_html(one_line(problem.finding.message))}"
    return ["<details>", f"<summary>{summary}</summary>", "", *fenced(text), "", "</details>"]


def cell(text: str) -> str:
    """Escape a text so that neither HTML nor Markdown, in a table too, changes it."""
    return re.sub(r"([\\`*_\[\]~|])", r"\\\1", _html(one_line(text)))


def fenced(text: str) -> list[str]:
    """Return the lines of a block of text, within more backticks than it has itself."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}text", text, fence]


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut(text: str) -> str:
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= BYTES:
        return text
    return encoded[:BYTES].decode("utf-8", "ignore") + "\n\n(cut: the summary is too long)\n"
