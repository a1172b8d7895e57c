"""Bars: communication per axis and per kind of collective, and memory per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnscaler.manifest import CommunicationProfile, CommunicationTotal, StageMemory, rank_memory
from nnscaler.records_as_json import encode
from verify.report_formats.html.page_elements import count, escape, folded, panel, percent, size, table, value_html
from verify.report_formats.html.timeline import hue

LISTED = 200  # rows of the profile that the page lists
_PARTS = ("parameters", "gradients", "optimizer", "activations")


def communication_panel(profile: CommunicationProfile | None) -> str:
    """Return charts and all rows; nothing where nothing is communicated."""
    totals = () if profile is None else profile.totals
    if profile is None or not any(row.bytes or row.calls for row in totals):
        return ""
    charts = "".join(
        f"<div><h3>per {name}</h3>{_chart(_sums(totals, name))}</div>"
        for name in ("axis", "kind", "direction")
        if name != "direction" or any(row.direction for row in totals)
    )
    calls, volume = sum(row.calls for row in totals), sum(row.bytes for row in totals)
    remark = f"{count(calls, 'call')} and {size(volume)} in a step."
    return panel("Communication", f'<div class="pair">{charts}</div>{_every(profile)}', remark)


def _every(profile: CommunicationProfile) -> str:
    """Return the profile's classes of calls where it has them, else its totals; folded."""
    noun = "classes of equal calls" if profile.classes else "rows"
    rows = encode(profile.classes or profile.totals)
    columns = list(rows[0])
    cells = [[_cell(key, row[key]) for key in columns] for row in rows[:LISTED]]
    more = f" ({LISTED} are shown)" if len(rows) > LISTED else ""
    return folded(f"all {noun}, {len(rows)}{more}", f'<div class="scroll">{table(columns, cells, "plain")}</div>')


def _sums(totals: Iterable[CommunicationTotal], key: str) -> dict[str, tuple[int, int]]:
    """Return name -> (bytes, calls), the largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for row in totals:
        name = {"axis": row.axis, "kind": row.kind, "direction": row.direction}[key]
        volume, calls = sums.get(name, (0, 0))
        sums[name] = (volume + row.bytes, calls + row.calls)
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def _chart(sums: Mapping[str, tuple[int, int]]) -> str:
    largest = max((volume for volume, _ in sums.values()), default=0) or 1
    lines = "".join(
        f'<span>{escape(name)}</span><span class="track"><i style="width:{percent(volume / largest)}"></i></span>'
        f'<span class="value faint">{size(volume)}, {count(calls, "call")}</span>'
        for name, (volume, calls) in sums.items()
    )
    return f'<div class="bars">{lines}</div>'


def _cell(name: str, value: Any) -> str:
    """Return an entry of a row as HTML: of a time, what it is in words; sizes with their unit."""
    if isinstance(value, Mapping):
        return escape(value["text"])
    return size(value) if "bytes" in name else value_html(value)


def memory_panel(memory: Sequence[StageMemory] | None) -> str:
    """Return a stacked bar per role; roles that need the same are one bar."""
    rows = [held for _, held in rank_memory(memory or ())]
    largest = max((row.total for row in rows), default=0)
    if not largest:
        return ""
    parts = [part for part in _PARTS if any(getattr(row, part) for row in rows)]
    bars: dict[str, list[str]] = {}
    for row in rows:
        bars.setdefault(_stacked(row, parts, largest), []).append(row.ranks)
    lines = "".join(f"<span>{escape(', '.join(names))}</span>{bar}" for bar, names in bars.items())
    legend = "".join(
        f'<span><i style="background:{_color(i)}"></i>{escape(part)}</span>' for i, part in enumerate(parts)
    )
    small = " small" if len(bars) > 24 else ""
    remark = f"Bytes on each rank, estimated from shapes; at most {size(largest)}."
    body = f'<div class="legend">{legend}</div><div class="bars{small}">{lines}</div>'
    return panel("Memory per rank", body, remark)


def _stacked(row: StageMemory, parts: Sequence[str], largest: int) -> str:
    held = [(index, part, getattr(row, part)) for index, part in enumerate(parts)]
    pieces = "".join(
        f'<i style="width:{percent(held_bytes / largest)};background:{_color(index)}" '
        f'title="{escape(part)}: {size(held_bytes)}"></i>'
        for index, part, held_bytes in held
    )
    return f'<span class="track">{pieces}</span><span class="value faint">{size(row.total)}</span>'


def _color(index: int) -> str:
    return f"hsl({hue(index)} 60% 55%)"
