"""The report as JSON, for machines."""

from __future__ import annotations

from verify.report import Report
from verify.report_formats.line import Line, plain


def render(report: Report) -> list[Line]:
    """The JSON document, line by line."""
    return [plain(line) for line in report.to_json().splitlines()]
