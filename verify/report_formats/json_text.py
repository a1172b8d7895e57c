"""Reports as one JSON document, or as JSON lines. `docs/reports/report.schema.json` says what a document holds.

The lines are one object per check, finding and note, and a last one with the verdict on all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from verify.results.report import SCHEMA_VERSION, Report, totals
from verify.results.styled_line import StyledLine, plain, plain_lines


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return the document of the one report, or one that holds all of them."""
    document = reports[0].as_dict() if len(reports) == 1 else _several(reports, seconds)
    return plain_lines(json.dumps(document, indent=2, ensure_ascii=False))


def _several(reports: Sequence[Report], seconds: float) -> dict[str, Any]:
    return {**verdict_of(reports, seconds), "reports": [report.as_dict() for report in reports]}


def verdict_of(reports: Sequence[Report], seconds: float) -> dict[str, Any]:
    """Return the fields that describe all reports together."""
    found = totals(reports, seconds)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": found.tool,
        "verdict": found.verdict.word,
        "level": found.verdict.value,
        "exit_code": found.verdict.exit_code,
        "seconds": round(found.seconds, 3),
        "environment": dict(found.environment),
        "counts": {
            "reports": len(reports),
            "verdicts": {level.value: number for level, number in found.levels.items()},
            "checks": found.checks,
            "refuted": found.refuted,
        },
    }


def render_lines(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
    """Return lines of JSON objects, whose `type` is check, finding, note or, in the last line, verdict."""
    records = [record for report in reports for record in _records(report)]
    records.append({"type": "verdict", **verdict_of(reports, seconds)})
    return [plain(json.dumps(record, ensure_ascii=False)) for record in records]


def _records(report: Report) -> Iterator[dict[str, Any]]:
    document = report.as_dict()
    about = {key: document[key] for key in ("tool", "subject", "setting", "seed")}
    for check in document["checks"]:
        yield {"type": "check", **about, **check}
    for finding in document["findings"]:
        yield {"type": "finding", **about, **finding}
    for note in document["notes"]:
        yield {"type": "note", **about, "text": note}
