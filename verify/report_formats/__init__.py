"""Report formats by name. A new one is a file with `render(reports, seconds) -> list[Line]` and a line here.

A format renders a sequence of reports, one per operator or plan, and `seconds`, the time that all of them took
together (0: the sum of theirs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from verify.report_formats import full_and_concise, github, html, json_text, junit, sarif
from verify.results.report import Report
from verify.results.styled_line import StyledLine


class Format(Protocol):
    """The interface of a report format."""

    def __call__(self, reports: Sequence[Report], seconds: float = 0.0) -> list[StyledLine]: ...


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "full": full_and_concise.render,
        "concise": full_and_concise.render_concise,
        "json": json_text.render,
        "jsonl": json_text.render_lines,
        "junit": junit.render,
        "sarif": sarif.render,
        "github": github.render,
        "html": html.render,
    }
)
