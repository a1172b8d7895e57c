"""What ranks communicate, below their passes: a mark per call, and the picture of a step from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.instructions import read_instruction
from nnscaler.manifest import Bar, TimelineRow, TimelineRows
from nnscaler.performance.timeline_events import RECEIVED, SENT, Event, Ranks, StepEvents
from verify.report_formats.html.page_elements import escape, percent, size

FINEST = 2400  # marks of a lane; calls that are nearer to each other than that share one
_HEIGHT = 9  # pixels
_UNITS = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
# colours that stand apart from each other, and from light and from dark paper
_COLORS = {
    "all_reduce": "#d55e00",
    "all_gather": "#3a8fd0",
    "reduce_scatter": "#009e73",
    "all_to_all": "#cc79a7",
    "rotate": "#7a5cc0",
    SENT: "#937000",
    RECEIVED: "#c27c00",
}


@dataclass(frozen=True, slots=True)
class CallMark:
    """Calls of one kind that follow each other closely. `start`, `end`: in the unit of the timeline."""

    kind: str
    start: float
    end: float
    title: str


@dataclass(frozen=True, slots=True)
class Pictured:
    """A step to be drawn. `marks`: by role of the timeline's rows."""

    timeline: TimelineRows
    marks: Mapping[int, tuple[CallMark, ...]]


def pictured(events: StepEvents, until: float | None = None) -> Pictured:
    """Return the picture of a step: a row per device, or per rank where it was measured.

    `until`: seconds that are drawn; None: all.
    """
    rows: dict[tuple[int, Ranks], list[Event]] = {}
    for event in events.events:
        key = (event.device, event.ranks if events.source == "measured" else ())
        if until is None or event.end <= until:
            rows.setdefault(key, []).append(event)
    passes = {key: [e for e in found if read_instruction(e.instruction)] for key, found in rows.items()}
    bars = {key: [e for e in found if e.lane == "compute"] for key, found in passes.items()}
    shortest = min((e.end - e.start for found in bars.values() for e in found if e.end > e.start), default=1.0)
    name, unit = next(((n, u) for n, u in _UNITS if shortest >= u / 10), _UNITS[-1])
    named = {d.device: d.ranks for d in events.devices}
    drawn = tuple(
        TimelineRow(role, ranks_text(ranks or named[device]), tuple(_bar(e, unit) for e in bars[device, ranks]))
        for role, (device, ranks) in enumerate(rows)
    )
    end = max((e.end for e in chain.from_iterable(rows.values())), default=0.0)
    marks = {
        role: _marks([e for e in found if e.lane == "communication"], unit, end)
        for role, found in enumerate(rows.values())
    }
    if until is not None and end < events.seconds * (1 - 1e-9):
        name = f"{name}: the first {end / unit:.4g} of {events.seconds / unit:.4g}"
    busy = sum(e.end - e.start for found in bars.values() for e in found)
    bubble = 1 - busy / (end * len(rows)) if end else 0.0
    return Pictured(TimelineRows(name, drawn, round(events.seconds / unit, 4), round(bubble, 4)), marks)


def _bar(event: Event, unit: float) -> Bar:
    instruction = read_instruction(event.instruction)
    assert instruction is not None
    start, end = round(event.start / unit, 4), round(event.end / unit, 4)
    return Bar(event.kind, event.stage, instruction.micro, start, end)


def _marks(calls: Iterable[Event], unit: float, end: float) -> tuple[CallMark, ...]:
    together: list[list[Event]] = []
    for call in sorted(calls, key=lambda e: e.start):
        last = together[-1] if together else None
        if last is not None and last[0].kind == call.kind and call.start - last[-1].end < end / FINEST:
            last.append(call)
        else:
            together.append([call])
    return tuple(_mark(found, unit) for found in together)


def _mark(calls: Sequence[Event], unit: float) -> CallMark:
    first, start = calls[0], round(calls[0].start / unit, 4)
    end = round(max(call.end for call in calls) / unit, 4)
    handed = sum(call.handed_bytes for call in calls)
    runs = list(dict.fromkeys(call.instruction for call in calls))
    causes = list(dict.fromkeys(f"{call.module} {call.where}".strip() for call in calls))
    told = [
        f"{f'{len(calls)} times ' * (len(calls) > 1)}{first.kind} over {first.axis} in {runs[0]}" + _more(runs),
        size(handed),
        causes[0] + _more(causes),
        f"{start:g} to {end:g}",
    ]
    return CallMark(first.kind, start, end, ", ".join(told))


def _more(listed: Sequence[str]) -> str:
    return f" and {len(listed) - 1} more" if len(listed) > 1 else ""


def call_lane(marks: Sequence[CallMark], name: str, end: float) -> str:
    """Return the marks below the lane of ranks that are called `name`; nothing without marks."""
    if not marks:
        return ""
    drawn = "".join(
        f'<rect class="call" x="{percent(mark.start / end)}" height="{_HEIGHT}" fill="{_COLORS.get(mark.kind, "#888")}"'
        f' style="width:max(1px,{percent((mark.end - mark.start) / end)});stroke:none">'
        f"<title>{escape(mark.title)}</title></rect>"
        for mark in marks
    )
    label = escape(f"communication of ranks {name}")
    return (
        f'<div class="lane"><div class="who faint"></div><svg height="{_HEIGHT}"><title>{label}</title>'
        f"{drawn}</svg></div>\n"
    )


def call_legend(marks: Iterable[CallMark]) -> str:
    """Return the colours of the kinds that are drawn; nothing without marks."""
    kinds = {mark.kind for mark in marks}
    items = "".join(
        f'<span><i style="background:{color}"></i>{escape(kind)}</span>'
        for kind, color in _COLORS.items()
        if kind in kinds
    )
    return f'<div class="legend">{items}</div>' if items else ""
