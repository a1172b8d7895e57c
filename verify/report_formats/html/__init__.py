"""One page with everything: no script, nothing fetched, readable on a phone and on paper.

A part of which a report says nothing is left out. Several reports are folded below a table of them, and those that do
not pass are open.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.report_formats.html.comm_memory_bars import communication_panel, memory_panel
from verify.report_formats.html.errors_plot import errors_panel
from verify.report_formats.html.findings_checks_and_proof import (
    certificate_panel,
    checks_panel,
    findings_panel,
    lemmas_panel,
)
from verify.report_formats.html.page_elements import (
    badge,
    count,
    escape,
    facts,
    folded,
    page,
    panel,
    prose,
    seconds,
    table,
)
from verify.report_formats.html.timeline import timeline_panel
from verify.results.report import Report, Totals, totals
from verify.results.styled_line import StyledLine, counts, plain_lines, style_of

OPEN = 20  # of several reports, those that do not pass and are open from the start


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return the page."""
    found = totals(reports, seconds)
    single = reports[0] if len(reports) == 1 else None
    subject = single.subject if single is not None else count(len(reports), found.noun.rstrip("s"))
    body = _banner(found, subject, single)
    body += _report(single) if single is not None else _several(reports)
    told = {**found.environment, "seed": found.seed}
    body += panel("Environment", facts(told))
    title = f"{found.verdict.word}: {subject}"
    return plain_lines(page(title, body))


def _banner(found: Totals, subject: str, single: Report | None) -> str:
    if single is not None:
        told, level = single.setting, f" &middot; {escape(found.verdict.value)}" if found.verdict.passes else ""
    else:
        told = ", ".join(f"{number} {word.lower()}" for word, number in found.words.items() if number)
        told, level = told or "nothing was verified", ""
    tool = f'<span class="faint">nnscaler {escape(found.tool)}</span>'
    return (
        f'<header class="banner {style_of(found.verdict)}">{tool}<div class="word">{escape(found.verdict.word)}</div>'
        f"<h1>{escape(subject)}</h1><p>{prose(told)}</p>"
        f'<p class="faint">{escape(counts(found))}{level}</p></header>\n'
    )


def _report(report: Report) -> str:
    """Return all parts of one report."""
    more = report.attachments
    return "".join(
        (
            findings_panel(report),
            checks_panel(report.checks),
            errors_panel(more.tensors),
            timeline_panel(more.timeline),
            communication_panel(more.communication_profile),
            memory_panel(more.memory),
            lemmas_panel(more.lemmas),
            certificate_panel(more.certificate),
            _notes(report),
        )
    )


def _several(reports: Sequence[Report]) -> str:
    ordered = sorted(enumerate(reports), key=lambda item: -item[1].verdict.rank)
    rows = [
        [
            badge(report.verdict),
            f'<a href="#report-{index}">{escape(report.subject)}</a>',
            escape(report.verdict),
            f"{report.total - report.refuted} of {report.total}",
            prose(report.setting),
            seconds(report.seconds),
        ]
        for index, report in ordered
    ]
    if not rows:
        return panel("Nothing was verified", "<p>There was nothing to verify, which is no pass.</p>")
    shown = panel("Summary", table(("", "subject", "verdict", "agree", "setting", "time"), rows, "checks"))
    for place, (index, report) in enumerate(ordered):
        summary = f"{badge(report.verdict)} {escape(report.subject)}"
        wanted = place < OPEN and not report.verdict.passes
        setting = f'<p class="faint">{prose(report.setting)}</p>' if report.setting else ""
        shown += f'<div id="report-{index}">{folded(summary, setting + _report(report), "report", wanted)}</div>\n'
    return shown


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    items = "".join(f"<li>{prose(note)}</li>" for note in report.notes)
    return panel("Notes", f'<ul class="notes">{items}</ul>')
