"""Bars: communication per axis and per kind of collective, and memory per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verify.report_formats.html.text import amount, count, escape, folded, panel, percent, size, table, value_html
from verify.report_formats.html.timeline import hue

LISTED = 200  # rows of the profile that the page lists
_PARTS = ("parameters", "gradients", "optimizer", "activations")
_PLACES = ("stage", "role", "ranks", "total", "rank")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of one row of the profile in a step. `volume`: bytes, or elements where bytes are not known."""

    axis: str
    kind: str
    direction: str
    calls: float
    volume: float


def communication_panel(profile: Any) -> str:
    """Return two charts and all rows; nothing where nothing is communicated."""
    rows = [row for row in _rows(profile) if isinstance(row, Mapping) and ("collective" in row or "kind" in row)]
    in_bytes = all("bytes" in row for row in rows)
    traffic = [_traffic(row, in_bytes) for row in rows]
    if not any(row.volume or row.calls for row in traffic):
        return ""
    unit = "B" if in_bytes else "elements"
    charts = "".join(
        f"<div><h3>per {name}</h3>{_chart(_sums(traffic, name), unit)}</div>"
        for name in ("axis", "kind", "direction")
        if name != "direction" or any(row.direction for row in traffic)
    )
    calls, volume = sum(row.calls for row in traffic), sum(row.volume for row in traffic)
    remark = f"{count(round(calls), 'call')} and {size(volume, unit)} in a step."
    return panel("Communication", f'<div class="pair">{charts}</div>{_every(profile, rows)}', remark)


def _every(profile: Any, totals: list[Mapping[str, Any]]) -> str:
    """Return the profile's classes of calls where it has them, else its totals; folded."""
    classes = profile.get("classes") if isinstance(profile, Mapping) else None
    rows = [row for row in classes if isinstance(row, Mapping)] if isinstance(classes, list | tuple) else []
    noun = "classes of equal calls" if rows else "rows"
    rows = rows or totals
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(key, row.get(key, "")) for key in columns] for row in rows[:LISTED]]
    more = f" ({LISTED} are shown)" if len(rows) > LISTED else ""
    return folded(f"all {noun}, {len(rows)}{more}", f'<div class="scroll">{table(columns, cells, "plain")}</div>')


def _rows(profile: Any) -> Iterable[Any]:
    if isinstance(profile, Mapping):
        found = next((profile[key] for key in ("totals", "rows", "collectives") if key in profile), ())
        return found if isinstance(found, list | tuple) else ()
    return profile if isinstance(profile, list | tuple) else ()


def _traffic(row: Mapping[str, Any], in_bytes: bool) -> Traffic:
    kind = row.get("collective", row.get("kind", "other"))
    calls = row.get("calls", row.get("count", 1))
    volume = row.get("bytes" if in_bytes else "elements")
    direction = str(row.get("direction", ""))
    return Traffic(str(row.get("axis", "all")), str(kind), direction, amount(calls), amount(volume))


def _sums(traffic: Iterable[Traffic], key: str) -> dict[str, tuple[float, float]]:
    """Return name -> (volume, calls), the largest first."""
    sums: dict[str, tuple[float, float]] = {}
    for row in traffic:
        name = {"axis": row.axis, "kind": row.kind, "direction": row.direction}[key]
        volume, calls = sums.get(name, (0.0, 0.0))
        sums[name] = (volume + row.volume, calls + row.calls)
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def _chart(sums: Mapping[str, tuple[float, float]], unit: str) -> str:
    largest = max((volume for volume, _ in sums.values()), default=0.0) or 1.0
    lines = "".join(
        f'<span>{escape(name)}</span><span class="track"><i style="width:{percent(volume / largest)}"></i></span>'
        f'<span class="value faint">{size(volume, unit)}, {count(round(calls), "call")}</span>'
        for name, (volume, calls) in sums.items()
    )
    return f'<div class="bars">{lines}</div>'


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return escape(value.get("text", ", ".join(map(str, value.values()))))
    return size(amount(value)) if "bytes" in name and isinstance(value, int | float) else value_html(value)


def memory_panel(memory: Any) -> str:
    """Return a stacked bar per role; roles that need the same are one bar."""
    rows = [row for row in memory if isinstance(row, Mapping)] if isinstance(memory, list | tuple) else []
    parts = _parts(rows)
    totals = [max(amount(row.get("total")), sum(amount(row.get(part)) for part in parts)) for row in rows]
    if not any(totals):
        return ""
    largest = max(totals)
    bars: dict[str, list[str]] = {}
    for row, total in zip(rows, totals, strict=True):
        bars.setdefault(_stacked(row, parts, total, largest), []).append(_who(row))
    lines = "".join(f"<span>{escape(', '.join(names))}</span>{bar}" for bar, names in bars.items())
    legend = "".join(
        f'<span><i style="background:{_color(i)}"></i>{escape(part)}</span>' for i, part in enumerate(parts)
    )
    small = " small" if len(bars) > 24 else ""
    remark = f"Bytes on each rank, estimated from shapes; at most {size(largest)}."
    body = f'<div class="legend">{legend}</div><div class="bars{small}">{lines}</div>'
    return panel("Memory per rank", body, remark)


def _parts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    found = dict.fromkeys(key for row in rows for key in row if key not in _PLACES and amount(row[key]))
    return [*(part for part in _PARTS if part in found), *(part for part in found if part not in _PARTS)]


def _who(row: Mapping[str, Any]) -> str:
    return str(row.get("ranks", row.get("rank", row.get("role", row.get("stage", "")))))


def _stacked(row: Mapping[str, Any], parts: list[str], total: float, largest: float) -> str:
    pieces = "".join(
        f'<i style="width:{percent(amount(row.get(part)) / largest)};background:{_color(index)}" '
        f'title="{escape(part)}: {size(amount(row.get(part)))}"></i>'
        for index, part in enumerate(parts)
    )
    return f'<span class="track">{pieces}</span><span class="value faint">{size(total)}</span>'


def _color(index: int) -> str:
    return f"hsl({hue(index)} 60% 55%)"
