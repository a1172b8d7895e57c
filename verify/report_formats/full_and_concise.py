"""The report for people, in full or a line per finding (`concise`: for editors, logs and `grep`).

In full: one line per check, notes, each finding with all that is known, the verdict line.

Several reports take a line each; below one that does not pass stand its checks that do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from nnscaler.errors import few
from verify.report_formats.finding_text import finding_lines
from verify.report_formats.machine_format_findings import findings_of, problems, reproduce_once
from verify.results.finding import Finding
from verify.results.report import Check, Report, totals
from verify.results.styled_line import WORDS, StyledLine, last_line, plain, style_of

WHOLE = 4  # findings shown with all that is known; the rest, which usually follow from them, take a line each
CHECKS = 60  # checks of one report that are shown; beyond them only those that do not pass
NOTES = 20  # different notes that are shown under several reports


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return every line of the report."""
    if len(reports) == 1:
        lines = [*check_lines(reports[0].checks), *(plain(f"note: {note}", "faint") for note in reports[0].notes)]
        findings: Sequence[Finding] = findings_of(reports[0])
    else:
        lines = [*_report_lines(reports), *_shared_notes(reports)]
        findings = [problem.finding for problem in problems(reports)]
    for finding in reproduce_once(findings[:WHOLE]):
        lines += [plain(""), *finding_lines(finding)]
    if len(findings) > WHOLE:
        lines += [plain(""), *(concise_line(finding) for finding in findings[WHOLE:])]
    apart = bool(findings) or any(report.notes for report in reports) or len(reports) > 1
    return [*lines, *([plain("")] if apart else []), *_levels(reports), last_line(reports, seconds)]


def check_lines(checks: Sequence[Check]) -> list[StyledLine]:
    """Return a line per check; where there are very many, those that do not pass, and how many others do."""
    shown = list(checks) if len(checks) <= CHECKS else [check for check in checks if not check.verdict.passes]
    name = max((len(check.name) for check in shown), default=0)
    level = max((len(check.verdict.value) for check in shown), default=0)
    lines = [check_line(check, name, level) for check in shown]
    if len(shown) < len(checks):
        rest = Counter(check.verdict for check in checks if check.verdict.passes)
        texts = [f"{number} {verdict}" for verdict, number in sorted(rest.items(), key=lambda item: -item[1])]
        lines.append(StyledLine((("PASS", "good"), (f"  {rest.total()} more checks: {', '.join(texts)}", ""))))
    return lines


def check_line(check: Check, name: int = 0, level: int = 0) -> StyledLine:
    """`PASS  gradients  TESTED (exact)  96 of 96 agree, worst difference 3e-15  0.3 s`."""
    style = style_of(check.verdict)
    agreed = f"{check.count - check.refuted} of {check.count} agree" if check.count else "nothing compared"
    detail = f", {check.detail}" if check.detail else ""
    seconds = f"  {check.seconds:.1f} s" if check.seconds >= 0.05 else ""
    text = f"  {check.name:<{name}}  {check.verdict.value:<{level}}  {agreed}{detail}"
    word = "----" if check.verdict.passes and not check.count else WORDS[style]
    return StyledLine(((word, "faint" if word == "----" else style), (text, ""), (seconds, "faint")))


def _report_lines(reports: Sequence[Report]) -> list[StyledLine]:
    """`PASS  aten.gelu.default  PROVED (all sizes)  24 of 24 agree  0.2 s`, and what does not pass below it."""
    lines: list[StyledLine] = []
    name = max((len(report.subject) for report in reports), default=0)
    level = max((len(report.verdict.value) for report in reports), default=0)
    for report in reports:
        whole = Check(report.subject, report.verdict, report.total, report.refuted, report.seconds)
        lines.append(check_line(whole, name, level))
        failing = [check for check in report.checks if not check.verdict.passes]
        lines += [StyledLine((("      ", ""), *line.pieces)) for line in check_lines(failing)]
    return lines


def _shared_notes(reports: Sequence[Report]) -> list[StyledLine]:
    """Return each different note once, with the reports that have it."""
    subjects: dict[str, list[str]] = {}
    for report in reports:
        for note in report.notes:
            subjects.setdefault(note, []).append(report.subject)
    lines = [plain(f"note: {note} ({few(names)})", "faint") for note, names in list(subjects.items())[:NOTES]]
    if len(subjects) > NOTES:
        lines.append(plain(f"note: {len(subjects) - NOTES} more notes; --output-format json has them", "faint"))
    return lines


def _levels(reports: Sequence[Report]) -> Iterable[StyledLine]:
    """`180 PROVED (all sizes), 40 TESTED (exact)`, for several reports."""
    if len(reports) < 2:
        return []
    return [plain(", ".join(f"{number} {level}" for level, number in totals(reports).levels.items()))]


def render_concise(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return a line per finding, then the verdict."""
    return [*(concise_line(problem.finding) for problem in problems(reports)), last_line(reports, seconds)]


def concise_line(finding: Finding) -> StyledLine:
    """`gpt.py:31: gradient_differs the gradient of ...`."""
    place = f"{finding.where}: " if finding.where is not None else ""
    return StyledLine(((place, "faint"), (finding.code, "bad"), (f" {one_line(finding.message)}", "")))


def one_line(text: str) -> str:
    """Return the text with each run of white space, ends of lines among it, as one space."""
    return " ".join(text.split())
