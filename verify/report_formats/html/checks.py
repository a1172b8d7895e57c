"""The table of checks, worst first where there are many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verify.report_formats.html.text import badge, count, escape, folded, panel, prose, seconds, table
from verify.results.report import Check
from verify.results.verdict import Verdict

SHOWN = 60  # checks that pass and are shown; the others are folded
_HEAD = ("", "check", "verdict", "agree", "detail", "time")
_ORDER = list(Verdict)


def checks_panel(checks: Sequence[Check]) -> str:
    """Return every check with its counts."""
    if not checks:
        return ""
    ordered = list(checks) if len(checks) <= SHOWN else sorted(checks, key=lambda c: -_ORDER.index(c.verdict))
    failing = sum(not check.verdict.passes for check in ordered)
    shown = ordered[: max(SHOWN, failing)]
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
