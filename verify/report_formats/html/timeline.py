"""The schedule, rank by time: a lane per role, a bar per pass of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from types import MappingProxyType

from nnscaler.manifest import Bar, TimelineRows
from nnscaler.performance.timeline_events import StepEvents, call_sums
from nnscaler.planning.cluster.description import show_seconds
from verify.report_formats.html.communication_lane import CallMark, call_lane, call_legend, pictured
from verify.report_formats.html.page_elements import escape, page, panel, percent, size, table

HUES = (212, 28, 145, 340, 265, 180, 50, 0)
LEGEND = 24  # stages that are named; beyond, each bar says its own
COLUMN, WIDEST = 900, 2400  # pixels: what a desktop shows without scrolling, and beyond which bars get narrower
_PIXELS = 11  # of the narrowest bar
Calls = Mapping[int, tuple[CallMark, ...]]  # by role
NO_CALLS: Calls = MappingProxyType({})
# saturation and lightness, by kind
_COLORS = {"F": (65, 70), "B": (55, 40), "I": (65, 28), "W": (28, 82), "U": (10, 55)}
_OTHER = (20, 50)
_EVEN = 0.179  # the luminance on which black and white stand out alike


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that do the same at the same time."""

    name: str
    bars: tuple[Bar, ...]
    calls: tuple[CallMark, ...] = ()


def timeline_panel(timeline: TimelineRows | None, calls: Calls = NO_CALLS) -> str:
    """Return the lanes, with what is communicated below them; nothing where there are no bars."""
    if timeline is None:
        return ""
    lanes = lanes_of(timeline, calls)
    ends = (bar.end for lane in lanes for bar in lane.bars)
    end = max((*ends, *(mark.end for lane in lanes for mark in lane.calls)), default=0.0)
    if not end:
        return ""
    stages = sorted({bar.stage for lane in lanes for bar in lane.bars})
    hues = {stage: hue(index) for index, stage in enumerate(stages)}
    height = 24 if len(lanes) <= 24 else 16 if len(lanes) <= 64 else 11
    narrowest = min(bar.end - bar.start for lane in lanes for bar in lane.bars if bar.end > bar.start)
    wanted = round(end / narrowest * (_PIXELS if height >= 14 else _PIXELS / 4))
    width = min(wanted, WIDEST) if wanted > 1.3 * COLUMN else min(wanted, COLUMN)
    names = min(16, max(4.5, 2 + max(len(lane.name) for lane in lanes) * 0.62))
    rows = (_lane(lane, end, hues, height, max(width, 300)) + call_lane(lane.calls, lane.name, end) for lane in lanes)
    body = "".join(rows) + _times(end, timeline.unit)
    inside = f'<div style="min-width:{width + 90}px;--names:{names:.1f}em">{body}</div>'
    busy = sum(bar.end - bar.start for lane in lanes for bar in lane.bars) / (end * len(lanes))
    drawn = {bar.kind for lane in lanes for bar in lane.bars}
    kinds = [kind for kind in _COLORS if kind in drawn] if drawn & {"W", "U"} else ["F", "B"]
    remark = f"{_remark(kinds)}; the number is the micro-batch. Idle: {1 - busy:.0%}."
    legends = _legend(hues, kinds) + call_legend(mark for lane in lanes for mark in lane.calls)
    return panel("Schedule", f'{legends}<div class="scroll">{inside}</div>', remark)


def hue(index: int) -> int:
    """Return a hue that stands apart from its neighbours."""
    return HUES[index] if index < len(HUES) else round(index * 137.508) % 360


def lanes_of(timeline: TimelineRows, calls: Calls = NO_CALLS) -> list[Lane]:
    """Return the rows of the timeline; those with the same bars and calls are one lane. `calls`: by role."""
    lanes: dict[tuple[tuple[Bar, ...], tuple[CallMark, ...]], list[str]] = {}
    for row in timeline.rows:
        if row.bars:
            lanes.setdefault((row.bars, calls.get(row.role, ())), []).append(row.ranks)
    return [Lane(", ".join(names), *drawn) for drawn, names in lanes.items()]


def _lane(lane: Lane, end: float, hues: Mapping[int, int], height: int, width: int) -> str:
    drawn: list[str] = []
    for bar in lane.bars:
        share = (bar.end - bar.start) / end
        fill = color(hues[bar.stage], bar.kind)
        title = f"{bar.kind} of micro-batch {bar.micro}, stage {bar.stage}: {bar.start:g} to {bar.end:g}"
        box = f'x="{percent(bar.start / end)}" width="{percent(share)}" height="{height}"'
        drawn.append(f'<rect {box} fill="{fill}"><title>{escape(title)}</title></rect>')
        if height >= 14 and share * width >= 6 * len(str(bar.micro)) + 1:
            middle = percent((bar.start + bar.end) / 2 / end)
            style = ink(hues[bar.stage], bar.kind)
            text = f'<text class="{style}" x="{middle}" y="{height / 2 + 4:g}" text-anchor="middle">'
            drawn.append(f"{text}{escape(bar.micro)}</text>")
    who = f'<div class="who">{escape(lane.name)}</div>'
    return f'<div class="lane">{who}<svg height="{height}">{"".join(drawn)}</svg></div>\n'


def color(hue: int, kind: str) -> str:
    """Return the colour of a kind of pass, in that of its stage."""
    saturation, lightness = _COLORS.get(kind, _OTHER)
    return f"hsl({hue} {saturation}% {lightness}%)"


def ink(hue: int, kind: str) -> str:
    """Return `dark` or `light`: what is read on a pass of this kind, in the colour of its stage."""
    saturation, lightness = _COLORS.get(kind, _OTHER)
    shares = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "dark" if luminance > _EVEN else "light"


def _remark(kinds: Sequence[str]) -> str:
    """Say what the colours mean."""
    updates = ", updates grey" if "U" in kinds else ""
    if "W" not in kinds:
        return f"Forward passes are light, backward passes dark{updates}"
    whole = ", backward passes dark" if "B" in kinds else ""
    return f"Forward passes are light{whole}{updates}; of a backward in two halves, I is darkest and W pale"


def _times(end: float, unit: str) -> str:
    ticks = _ticks(end)
    drawn = "".join(
        f'<line x1="{percent(t / end)}" x2="{percent(t / end)}" y1="0" y2="5"/>'
        f'<text x="{percent(t / end)}" y="16" text-anchor="{"start" if not t else "middle"}">{t:g}</text>'
        for t in ticks
    )
    return (
        '<div class="lane times"><div class="who faint">ranks</div>'
        f'<svg height="20" aria-hidden="true">{drawn}</svg></div>'
        f'<div class="remark" style="margin:0">time in {escape(unit)}</div>'
    )


def _ticks(end: float) -> list[float]:
    """Round numbers, at most ten, the last well before the end."""
    step = 10.0 ** len(str(int(end)))
    while end / step < 4:
        step /= 2 if str(step)[0] != "5" else 2.5
    return [step * index for index in range(int(end / step * 0.97) + 1)]


def _legend(hues: Mapping[int, int], kinds: Sequence[str]) -> str:
    if len(hues) > LEGEND:
        return f'<p class="legend">{len(hues)} stages, each with a colour of its own</p>'
    items = (
        f"<span>{''.join(_swatch(found, kind) for kind in kinds)}stage {escape(stage)}</span>"
        for stage, found in hues.items()
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _swatch(hue: int, kind: str) -> str:
    return f'<i style="background:{color(hue, kind)}"></i>'


# `nnscaler timeline --html`: the events of a step as one page without scripts.


_KINDS_OF_CALLS = 40  # kinds of calls in the table


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
    for calls in call_sums(events)[:_KINDS_OF_CALLS]:
        told = (f"{calls.calls:,}", size(calls.bytes), show_seconds(calls.seconds), calls.cause)
        rows.append([escape(cell) for cell in (calls.kind, calls.direction, calls.axis, *told)])
    if not rows:
        return ""
    head = ("call", "direction", "axis", "calls of all ranks", "bytes", "a rank takes", "cause")
    return panel("Calls", table(head, rows, "plain"), "Those that take longest first.")
