"""The page's findings, its table of checks, and the basis of a proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from op_registry.source_location import SourceLocation

from nnscaler.records_as_json import encode
from verify.report_formats.finding_text import caret_line
from verify.report_formats.html.page_elements import (
    badge,
    code,
    count,
    escape,
    facts,
    folded,
    panel,
    prose,
    seconds,
    table,
    value_html,
)
from verify.report_formats.machine_format_findings import findings_of
from verify.results.finding import Finding
from verify.results.finding_codes import CODES, UNDECIDED
from verify.results.report import Check, Report
from verify.results.typed_attachments import Certificate, LemmaRow
from verify.results.verdict import Verdict

# The basis of a static proof: its lemmas, and the certificate that the schedule has no deadlock.

SHOWN_LEMMAS = 40  # lemmas that are shown; the others are folded


def lemmas_panel(lemmas: Sequence[LemmaRow] | None) -> str:
    """Return a table of the lemmas; nothing where there are none."""
    if not lemmas:
        return ""
    rows = encode(lemmas)
    columns = list(rows[0])
    cells = [[value_html(value) for value in row.values()] for row in rows]
    body = table(columns, cells[:SHOWN_LEMMAS], "plain")
    if len(cells) > SHOWN_LEMMAS:
        body += folded(f"{len(cells) - SHOWN_LEMMAS} more lemmas", table(columns, cells[SHOWN_LEMMAS:], "plain"))
    return panel(f"Lemmas ({len(rows)})", body)


def certificate_panel(certificate: Certificate | None) -> str:
    """Return the certificate's entries, one below the other."""
    return "" if certificate is None else panel("Certificate", facts(encode(certificate)))


# The table of checks, worst first where there are many.

SHOWN_CHECKS = 60  # checks that pass and are shown; the others are folded
_HEAD = ("", "check", "verdict", "agree", "detail", "time")


def checks_panel(checks: Sequence[Check]) -> str:
    """Return every check with its counts."""
    if not checks:
        return ""
    ordered = list(checks) if len(checks) <= SHOWN_CHECKS else sorted(checks, key=lambda c: -c.verdict.rank)
    failing = sum(not check.verdict.passes for check in ordered)
    shown = ordered[: max(SHOWN_CHECKS, failing)]
    body = table(_HEAD, map(_row, shown), "checks")
    rest = ordered[len(shown) :]
    if rest:
        levels = Counter(check.verdict.value for check in rest)
        told = ", ".join(f"{number} {level}" for level, number in levels.most_common())
        body += folded(f"{count(len(rest), 'more check')}: {escape(told)}", table(_HEAD, map(_row, rest), "checks"))
    return panel(f"Checks ({len(checks)})", body)


def _row(check: Check) -> list[str]:
    mark = badge(check.verdict)
    if check.verdict.passes and not check.count:
        mark = '<span class="badge none">----</span>'
    agreed = f"{check.count - check.refuted} of {check.count}" if check.count else "nothing compared"
    name = f"<b>{prose(check.name or 'verdict')}</b>"
    return [mark, name, escape(check.verdict), agreed, prose(check.detail), seconds(check.seconds)]


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
