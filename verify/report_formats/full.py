"""The report for people: notes, one line per check, each finding with all that is known, the verdict line."""

from __future__ import annotations

from verify.finding import Finding
from verify.report import Check, Report
from verify.report_formats.concise import concise_line
from verify.report_formats.line import Line, last_line, plain, style_of

WHOLE = 4  # findings shown with all that is known; the rest, which usually follow from them, take a line each
WIDTH = 140  # a counter-example that is longer takes a line for each fact
_WORDS = {"good": "PASS", "bad": "FAIL", "unsure": "OPEN"}


def render(report: Report) -> list[Line]:
    """Every line of the report."""
    lines: list[Line] = []
    width = max((len(check.name) for check in report.checks), default=0)
    lines += [check_line(check, width) for check in report.checks]
    lines += [plain(f"note: {note}", "faint") for note in report.notes]
    for finding in report.findings[:WHOLE]:
        lines += [plain(""), *finding_lines(finding)]
    if len(report.findings) > WHOLE:
        lines += [plain(""), *(concise_line(finding) for finding in report.findings[WHOLE:])]
    lines += [plain(""), last_line(report)] if report.findings or report.notes else [last_line(report)]
    return lines


def check_line(check: Check, width: int = 0) -> Line:
    """`PASS  gradients  96 of 96 agree, worst difference 3e-15  0.3 s`."""
    style = style_of(check.verdict)
    agreed = f"{check.count - check.refuted:>4} of {check.count} agree"
    detail = f", {check.detail}" if check.detail else ""
    seconds = f"  {check.seconds:.1f} s" if check.seconds >= 0.05 else ""
    return Line(((_WORDS[style], style), (f"  {check.name:<{width}}  {agreed}{detail}", ""), (seconds, "faint")))


def finding_lines(finding: Finding) -> list[Line]:
    """The anatomy of a finding: code and message, place with its line, counter-example, cause, help, reproduce."""
    lines = [Line(((finding.code, "bad"), (f"  {finding.message}", "strong")))]
    if finding.where is not None:
        lines.append(plain(f"  --> {finding.where}", "faint"))
        if finding.where.text:
            number = str(finding.where.line)
            lines.append(plain(f"  {' ' * len(number)} |", "faint"))
            lines.append(Line(((f"  {number} | ", "faint"), (finding.where.text, ""))))
            lines.append(plain(f"  {' ' * len(number)} |", "faint"))
    for what, place in finding.related:
        lines.append(plain(f"  {what}: {place}"))
        if place.text:
            lines.append(plain(f"      {place.text}"))
    if finding.counter_example:
        facts = [f"{key}={value}" for key, value in finding.counter_example.items()]
        if sum(map(len, facts)) <= WIDTH:
            lines.append(plain(f"  = counter-example: {', '.join(facts)}"))
        else:
            lines += [plain("  = counter-example:"), *(plain(f"      {fact}") for fact in facts)]
    if finding.cause:
        lines.append(plain(f"  = cause: {finding.cause}"))
    if finding.help:
        lines += _labelled("help", finding.help)
    if finding.reproduce:
        lines.append(plain(f"  reproduce: {finding.reproduce}"))
    return lines


def _labelled(label: str, text: str) -> list[Line]:
    first, *rest = text.splitlines() or [""]
    indent = " " * (len(label) + 2)
    return [plain(f"  {label}: {first}"), *(plain(f"  {indent}{line}") for line in rest)]
