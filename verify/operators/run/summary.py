"""Summarise many reports: what keeps operators from being proved, what could not be shown, what was cached."""

from __future__ import annotations

from collections.abc import Sequence

from verify.operators.run.cache import CACHED
from verify.results.line import StyledLine, plain
from verify.results.report import Report
from verify.results.verdict import Verdict

BLOCKED = "not proved for all sizes: "  # in a check's detail, followed by what blocks its proof
VOID = "constant along the split: "  # in a check's detail: wrong variants that cannot differ from the right result
OTHERS = 5  # names in one row of the table


def summary(reports: Sequence[Report]) -> list[StyledLine]:
    """Return the tables, one below the other; nothing for what there is none of."""
    return [*_table("not proved for all sizes, and why", _blocked(reports)), *_void(reports), *_cached(reports)]


def _blocked(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Map each reason that blocks a proof to the operators that pass without one because of it."""
    found: dict[str, list[str]] = {}
    for report in reports:
        if not report.verdict.passes or report.verdict is Verdict.PROVED_ALL_SIZES:
            continue
        reasons = [reason for check in report.checks if (reason := _after(BLOCKED, check.detail))]
        for reason in dict.fromkeys(reasons):
            found.setdefault(reason, []).append(report.subject)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def _void(reports: Sequence[Report]) -> list[StyledLine]:
    rows: dict[str, list[str]] = {}
    for report in reports:
        for check in report.checks:
            variants = _after(VOID, check.detail)
            if variants:
                rows.setdefault(f"{report.subject} {check.name}", []).append(variants)
    return _table("void: wrong variants that equal the right result, which is constant along the split", rows)


def _cached(reports: Sequence[Report]) -> list[StyledLine]:
    count = sum(CACHED in report.notes for report in reports)
    if not count:
        return []
    return [plain(f"cached: {count} of {len(reports)} passed before and have not changed (--no-cache runs them)")]


def _table(title: str, rows: dict[str, list[str]]) -> list[StyledLine]:
    if not rows:
        return []
    width = min(max(map(len, rows)), 60)
    lines = [plain(f"{title}:", "strong")]
    for key, names in rows.items():
        more = f" and {len(names) - OTHERS} more" if len(names) > OTHERS else ""
        lines.append(plain(f"  {key:<{width}}  {', '.join(names[:OTHERS])}{more}"))
    return [*lines, plain("")]


def _after(label: str, detail: str) -> str:
    """Return the text after a label in a detail, up to the next `;`."""
    _, found, rest = detail.partition(label)
    return rest.partition(";")[0].strip() if found else ""
