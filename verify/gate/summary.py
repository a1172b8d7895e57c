"""The gate's result as Markdown, to be pasted into a review: verdict, a table of items, findings, what it was run with.

Worst first; known findings last, a line each. Nothing is left out without being counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from verify.gate.outcome import KNOWN, GateOutcome, JudgedItem
from verify.report_formats.concise import one_line
from verify.report_formats.finding_text import finding_lines
from verify.report_formats.problems import findings_of, reproduce_once
from verify.results.finding import Finding
from verify.results.totals import totals

ROWS = 200
FINDINGS = 30
WIDTH = 2000  # characters of one line of a finding: a token may be longer than any screen


def summary(outcome: GateOutcome, seconds: float, budget: float | None, interrupted: bool = False) -> str:
    """Return the text; it ends with an end of line."""
    head = f"### nnscaler gate: {outcome.word}" + (", interrupted" if interrupted else "")
    lines = [head, "", counts(outcome, seconds, budget), "", *_table(outcome.judged)]
    lines += _findings(outcome)
    lines += ["", _made_with(outcome)]
    return "\n".join(lines) + "\n"


def counts(outcome: GateOutcome, seconds: float, budget: float | None) -> str:
    """`4 items: 1 refuted, 3 verified; 312 checks, 2 refuted; 31.2 s of 120 s (seed 0)`."""
    words = Counter(judged.word for judged in outcome.judged)
    told = ", ".join(f"{number} {word.lower()}" for word, number in words.items())
    number = len(outcome.judged)
    found = totals([judged.result.report for judged in outcome.judged])
    cached = sum(judged.result.cached for judged in outcome.judged)
    limit = "" if budget is None else f" of {budget:g} s"
    return (
        f"{number} item{'s' * (number != 1)}" + (f": {told}" if told else "") + f"; {found.checks} checks, "
        f"{found.refuted} refuted; {seconds:.1f} s{limit} (seed {found.seed})"
        + (f"; {cached} unchanged since they passed" if cached else "")
    )


def _table(judged: Sequence[JudgedItem]) -> list[str]:
    lines = ["| item | verdict | level | checks | time |", "|---|---|---|---:|---:|"]
    for entry in judged[:ROWS]:
        report = entry.result.report
        taken = "cached" if entry.result.cached else f"{report.seconds:.1f} s"
        level = report.verdict.value if entry.word in ("VERIFIED", "KNOWN", "REFUTED") else "none"
        lines.append(f"| {cell(entry.result.name)} | {entry.word} | {level} | {report.total} | {taken} |")
    if len(judged) > ROWS:
        lines.append(f"| {len(judged) - ROWS} more items | | | | |")
    return lines


def _findings(outcome: GateOutcome) -> list[str]:
    """Return the lines of findings: new ones first, then those of the baseline, known ones last."""
    listed: list[tuple[str, Finding]] = []
    for entry in outcome.judged:
        if entry.word != "VERIFIED":
            listed += [(entry.result.name, finding) for finding in findings_of(entry.result.report)]
    if outcome.baseline is not None:
        listed += [(outcome.baseline.subject, finding) for finding in outcome.baseline.findings]
    listed.sort(key=lambda pair: KNOWN in pair[1].counter_example)
    lines: list[str] = []
    shown = listed[:FINDINGS]
    new = iter(reproduce_once([finding for _, finding in shown if KNOWN not in finding.counter_example]))
    for name, finding in shown:
        lines += ["", *_details(name, finding if KNOWN in finding.counter_example else next(new))]
    if len(listed) > FINDINGS:
        lines += ["", f"{len(listed) - FINDINGS} more findings are not shown here."]
    return lines


def _details(name: str, finding: Finding) -> list[str]:
    if KNOWN in finding.counter_example:
        told = f": {finding.message}, known {finding.counter_example[KNOWN]}"
        return [f"**{finding.code}** in {cell(name + told)}"]
    text = "\n".join(line.text if len(line.text) <= WIDTH else _cut(line.text) for line in finding_lines(finding))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"**{finding.code}** in {cell(name)}", "", f"{fence}text", text, fence]


def _cut(text: str) -> str:
    """Shorten a line. A token that is cut cannot be replayed, so the line says so instead."""
    return f"{text[:120]}... ({len(text)} characters: see the full report)"


def _made_with(outcome: GateOutcome) -> str:
    found = next((j.result.report.environment for j in outcome.judged if "torch" in j.result.report.environment), {})
    names = ("nnscaler", "torch", "python", "platform")
    return ", ".join(found[name] if name == "platform" else f"{name} {found[name]}" for name in names if name in found)


def cell(text: str) -> str:
    """Escape a text so that Markdown, in a table too, does not change it."""
    plain = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]~|])", r"\\\1", plain)
