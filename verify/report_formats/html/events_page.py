"""`nnscaler timeline --html`: the events of a step as one page without scripts."""

from __future__ import annotations

from nnscaler.planning.cluster.description import show_seconds
from nnscaler.timeline_events import StepEvents, call_sums
from verify.report_formats.html.communication_lane import pictured
from verify.report_formats.html.page_elements import escape, page, panel, size, table
from verify.report_formats.html.timeline import timeline_panel

_MOST = 40  # kinds of calls in the table


def events_page(model: str, title: str, events: StepEvents) -> str:
    """Return HTML."""
    picture = pictured(events)
    subject = f'<span class="faint">nnscaler timeline: {escape(model)}, {escape(events.source)}</span>'
    word = f'<div class="word">{escape(show_seconds(events.seconds))} a step</div>'
    banner = f'<header class="banner plain">{subject}{word}<p>{escape(title)}</p></header>\n'
    body = banner + timeline_panel(picture.timeline, picture.marks) + _calls(events)
    return page(f"{model}: {title}", body)


def _calls(events: StepEvents) -> str:
    rows = []
    for calls in call_sums(events)[:_MOST]:
        told = (f"{calls.calls:,}", size(calls.bytes), show_seconds(calls.seconds), calls.cause)
        rows.append([escape(cell) for cell in (calls.kind, calls.direction, calls.axis, *told)])
    if not rows:
        return ""
    head = ("call", "direction", "axis", "calls of all ranks", "bytes", "a rank takes", "cause")
    return panel("Calls", table(head, rows, "plain"), "Those that take longest first.")
