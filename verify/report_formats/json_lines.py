"""Reports as JSON lines: one object per check, finding and note, and a last one with the verdict on all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from verify.report_formats.json_text import verdict_of
from verify.results.line import StyledLine, plain
from verify.results.report import Report


def render(reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]:
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
