"""Error against tolerance: one dot per tensor that was compared, on a logarithmic axis where 1 is what is allowed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verify.report_formats.html.page_elements import count, escape, panel, percent
from verify.results.styled_line import style_of
from verify.results.typed_attachments import ComparedTensor

HEIGHT = 44
DOTS = 1500  # dots of one kind that are drawn each; beyond, dots at one place are drawn once
_LEFT, _RIGHT = 0.07, 0.93  # the axis; left of it stand errors of zero, right of it infinity and NaN
_SLOTS = (0, -4, 4, -8, 8, -12, 12)


@dataclass(frozen=True, slots=True)
class Dot:
    """`ratio`: the error as a multiple of what is allowed."""

    name: str
    step: int
    error: float
    allowed: float
    ratio: float
    style: str

    @property
    def label(self) -> str:
        return f"{self.name}, step {self.step}: {self.error:.2g} of {self.allowed:.2g} allowed"


@dataclass(frozen=True, slots=True)
class Axis:
    """Decades from 10**low to 10**high."""

    low: int
    high: int

    def place(self, ratio: float) -> float:
        """0 (left) to 1 (right)."""
        if ratio == 0:
            return 0.02
        if not math.isfinite(ratio):
            return 0.98
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, share))


def errors_panel(rows: Sequence[ComparedTensor] | None) -> str:
    """Return a strip for each kind of tensor; nothing where nothing was compared."""
    kinds: dict[str, list[Dot]] = {}
    for row in rows or ():
        kinds.setdefault(row.kind, []).append(_dot(row))
    if not kinds:
        return ""
    axis = axis_of(dot.ratio for dots in kinds.values() for dot in dots)
    body = "".join(_strip(kind, dots, axis) for kind, dots in kinds.items()) + _ticks(axis)
    total = sum(map(len, kinds.values()))
    remark = f"One dot for each of {count(total, 'compared tensor')}: its error divided by what is allowed."
    return panel("Error and tolerance", body, remark)


def axis_of(ratios: Iterable[float]) -> Axis:
    """Return an axis of whole decades around all ratios, 1 always among them."""
    logs = [math.log10(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    low, high = math.floor(min([*logs, -1.0])), math.ceil(max([*logs, 1.0]))
    return Axis(max(low, -18), min(high, 30))


def _dot(row: ComparedTensor) -> Dot:
    ratio = _ratio(abs(row.error), row.allowed)
    return Dot(row.name, row.step, row.error, row.allowed, ratio, style_of(row.verdict))


def _ratio(error: float, allowed: float) -> float:
    if math.isnan(error) or math.isnan(allowed):
        return math.inf
    if allowed > 0:
        return error / allowed if math.isfinite(allowed) or not math.isfinite(error) else 0.0
    return 0.0 if error == 0 else math.inf


def _strip(kind: str, dots: Sequence[Dot], axis: Axis) -> str:
    worst = max(dots, key=lambda dot: (dot.style == "bad", dot.ratio if not math.isnan(dot.ratio) else math.inf))
    head = (
        f'<div class="strip-head"><b>{escape(kind)}</b><span class="faint">{len(dots)} compared</span>'
        f'<span class="faint">worst: {escape(worst.label)}</span></div>'
    )
    allowed = percent(axis.place(1.0))
    grid = "".join(
        f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"/>'
        for x in (percent(axis.place(10.0**power)) for power in _powers(axis))
    )
    line = f'<line class="allowed" x1="{allowed}" x2="{allowed}" y1="0" y2="{HEIGHT}" stroke-dasharray="4 3"/>'
    plot = f'<rect class="plot" width="100%" height="{HEIGHT}" rx="4"/>'
    inside = f"{plot}{grid}{line}{_dots(dots, worst, axis)}{_tag(worst, axis)}"
    title = f"{kind}: errors of {len(dots)} tensors as multiples of what is allowed; worst {worst.label}"
    return (
        f'<div class="strip">{head}<svg height="{HEIGHT}" role="img" aria-label="{escape(title)}">{inside}</svg></div>'
    )


def _dots(dots: Sequence[Dot], worst: Dot, axis: Axis) -> str:
    taken: Counter[int] = Counter()
    drawn: list[str] = []
    for dot in sorted(dots, key=lambda dot: (dot is worst, dot.style != "good")):
        place = axis.place(dot.ratio)
        column = round(place * 125)
        taken[column] += 1
        if len(dots) > DOTS and taken[column] > len(_SLOTS) and dot.style == "good" and dot is not worst:
            continue
        y = HEIGHT // 2 + _SLOTS[(taken[column] - 1) % len(_SLOTS)]
        style, radius = (f"{dot.style} worst", 4.5) if dot is worst else (dot.style, 3)
        title = f"<title>{escape(dot.label)}</title>"
        drawn.append(f'<circle class="{style}" cx="{percent(place)}" cy="{y}" r="{radius}">{title}</circle>')
    return "".join(drawn)


def _tag(worst: Dot, axis: Axis) -> str:
    """Return the name of the worst, on the side that has room."""
    place = axis.place(worst.ratio)
    anchor, shift = ("end", -9) if place > 0.5 else ("start", 9)
    name = worst.name if len(worst.name) <= 34 else "..." + worst.name[-31:]
    return f'<text class="tag" x="{percent(place)}" dx="{shift}" y="10" text-anchor="{anchor}">{escape(name)}</text>'


def _powers(axis: Axis) -> list[int]:
    """Return at most nine decades, 0 among them."""
    step = max(1, math.ceil((axis.high - axis.low) / 8))
    return [power for power in range(axis.low, axis.high + 1) if power % step == 0]


def _ticks(axis: Axis) -> str:
    texts = "".join(
        f'<text x="{percent(axis.place(10.0**power))}" y="12" text-anchor="middle">{_power(power)}</text>'
        for power in _powers(axis)
        if power != 0
    )
    texts += f'<text class="allowed" x="{percent(axis.place(1.0))}" y="12" text-anchor="middle">allowed</text>'
    texts += '<text x="2%" y="12" text-anchor="middle">0</text><text x="98%" y="12" text-anchor="middle">inf</text>'
    return f'<svg height="16" aria-hidden="true">{texts}</svg>'


def _power(power: int) -> str:
    return str(10**power) if 0 < power <= 2 else f"1e{power}"
