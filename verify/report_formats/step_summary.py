"""A Markdown summary of reports, for $GITHUB_STEP_SUMMARY or a comment: verdict, a table, the worst findings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verify.report_formats.concise import one_line
from verify.report_formats.finding_text import finding_lines
from verify.report_formats.problems import ReportedFinding, problems
from verify.results.line import counts
from verify.results.report import Report
from verify.results.totals import totals
from verify.results.verdict import Verdict

ROWS = 100
FINDINGS = 20
BYTES = 900_000  # GitHub refuses a summary of more than 1 MiB
_ORDER = list(Verdict)


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
    rows = sorted(reports, key=lambda report: -_ORDER.index(report.verdict))
    if len(reports) == 1:
        cells = [(check.name, check.verdict, check.count, check.refuted) for check in reports[0].checks]
        first = "check"
    else:
        cells = [(report.subject, report.verdict, report.total, report.refuted) for report in rows]
        first = "subject"
    lines = [f"| {first} | verdict | comparisons | refuted |", "|---|---|---:|---:|"]
    lines += [f"| {_cell(name)} | {verdict} | {count} | {refuted} |" for name, verdict, count, refuted in cells[:ROWS]]
    if len(cells) > ROWS:
        lines.append(f"| {len(cells) - ROWS} more | | | |")
    return lines


def _details(problem: ReportedFinding) -> list[str]:
    text = "\n".join(line.text for line in finding_lines(problem.finding))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    summary = f"<b>{problem.severity}</b> {problem.finding.code}: {_html(one_line(problem.finding.message))}"
    return ["<details>", f"<summary>{summary}</summary>", "", f"{fence}text", text, fence, "", "</details>"]


def _cell(text: str) -> str:
    return _escape(one_line(text)).replace("|", "\\|")


def _escape(text: str) -> str:
    """Escape a text so that neither HTML nor Markdown changes it."""
    return re.sub(r"([\\`*_\[\]~])", r"\\\1", _html(text))


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut(text: str) -> str:
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= BYTES:
        return text
    return encoded[:BYTES].decode("utf-8", "ignore") + "\n\n(cut: the summary is too long)\n"
