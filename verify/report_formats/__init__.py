"""Report formats by name. A new one is a file with `render(report) -> list[Line]` and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from verify.report import Report
from verify.report_formats import concise, full, json_text
from verify.report_formats.line import Line

FORMATS: Mapping[str, Callable[[Report], list[Line]]] = MappingProxyType(
    {"full": full.render, "concise": concise.render, "json": json_text.render}
)
