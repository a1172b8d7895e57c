"""Findings: the code, the place with its line, what was seen, why, what to do, and a line that reproduces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from op_registry.spec import SourceLocation

from verify.report_formats.finding_text import caret_line
from verify.report_formats.html.text import code, count, escape, facts, folded, panel, prose
from verify.report_formats.problems import findings_of
from verify.results.catalogue import CODES, UNDECIDED
from verify.results.finding import Finding
from verify.results.report import Report
from verify.results.verdict import Verdict

SHOWN = 4  # findings that are shown; of the rest, which usually follow from them, the message
LISTED = 20  # messages that are listed from the start


def findings_panel(report: Report) -> str:
    """Return the findings of a report; nothing where there are none."""
    found = findings_of(report)
    if not found:
        return ""
    shared = _shared(found)
    if shared is not None:
        found = tuple(replace(finding, reproduce=None) for finding in found)
    open_report = report.verdict is not Verdict.REFUTED
    body = "".join(_finding(finding, open_report) for finding in found[:SHOWN])
    if len(found) > SHOWN:
        rest = "".join(_folded(finding, open_report) for finding in found[SHOWN:])
        number = len(found) - SHOWN
        body += folded(count(number, "more finding"), rest, is_open=number <= LISTED)
    return panel(f"Findings ({len(found)})", body + _reproduce(shared))


def _shared(found: Sequence[Finding]) -> str | None:
    """Return the line that reproduces every finding, where there are several and they have one."""
    lines = {finding.reproduce for finding in found}
    return next(iter(lines)) if len(lines) == 1 < len(found) else None


def _folded(finding: Finding, undecided: bool) -> str:
    return folded(f"{code(finding.code)} {prose(finding.message)}", _finding(finding, undecided))


def _finding(finding: Finding, undecided: bool) -> str:
    style = "open" if undecided or finding.code in UNDECIDED else "wrong"
    told = dict(finding.counter_example)
    sentence = CODES.get(finding.code, "")
    parts = [
        f'<h3 title="{escape(sentence)}">{escape(finding.code)}</h3>',
        f'<p class="message">{prose(finding.message)}</p>',
        _annotated(finding, told),
        facts(told) if told else "",
        f'<div class="cause"><span class="label">cause</span>{prose(finding.cause)}</div>' if finding.cause else "",
        "".join(_place(what, place) for what, place in finding.related),
        f'<p class="help"><span class="label">what to do</span>{prose(finding.help)}</p>' if finding.help else "",
        _reproduce(finding.reproduce),
        f'<p class="faint">{escape(sentence)} {code(f"nnscaler explain {finding.code}")} says more.</p>',
    ]
    return f'<article class="finding {style}">{"".join(parts)}</article>\n'


def _annotated(finding: Finding, told: Mapping[str, str]) -> str:
    """Return the place, its line, and the annotation with carets below its wrong identifiers."""
    parts = [_place("", finding.where)] if finding.where is not None else []
    annotation = told.get("annotation", "")
    carets = caret_line(annotation, told.get("identifier", "")) if annotation else None
    if carets is not None:
        parts.append(f'<pre>{escape(annotation)}\n<span class="caret">{escape(carets)}</span></pre>')
    return "".join(parts)


def _place(what: str, place: SourceLocation) -> str:
    head = f'<span class="label">{escape(what)}</span>' if what else ""
    text = place.text.strip("\n")
    line = f"<pre>{escape(f'{place.line} | {text.expandtabs(4)}')}</pre>" if text.strip() else ""
    return f'<p>{head}<span class="mono faint">{escape(place)}</span></p>{line}'


def _reproduce(line: str | None) -> str:
    return f'<p><span class="label">reproduce</span></p><pre class="wrap">{escape(line)}</pre>' if line else ""
