"""Write events in the trace event format of Chrome, which Perfetto (ui.perfetto.dev) opens.

A process is a pipeline device. Its threads are the lanes: of the device, or of each rank where it was measured; calls
that overlap in one lane get threads of their own, since slices of a thread must nest. An arrow leads from where a
message is sent to where it is received.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.performance.timeline_events import RECEIVED, SENT, DeviceRanks, Event, StepEvents

_MICROSECONDS = 1e6
_SHORTEST = 1e-3  # microseconds: an arrow needs a slice to start from
_GROUPS = 8  # that a slice lists

Entry = dict[str, Any]


def chrome_trace(events: StepEvents) -> str:
    """Return the text of a trace file."""
    entries: list[Entry] = []
    for device in events.devices:
        entries += _of_device(events, device)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries}, separators=(",", ":")) + "\n"


def _of_device(events: StepEvents, device: DeviceRanks) -> Iterator[Entry]:
    stages = "stage " if len(device.stages) == 1 else "stages "
    name = f"device {device.device}: ranks {ranks_text(device.ranks)}, {stages}{', '.join(map(str, device.stages))}"
    yield _named("process", name, device.device, 0)
    lanes: dict[str, list[Event]] = {}
    for event in (e for e in events.events if e.device == device.device):
        who = f"rank {event.ranks[0]} " if events.source == "measured" else ""
        lanes.setdefault(f"{who}{event.lane}", []).append(event)
    thread = 0
    for lane, found in sorted(lanes.items(), key=lambda entry: (entry[1][0].ranks[0], entry[1][0].lane != "compute")):
        rows = _rows(found)
        for number, row in enumerate(rows):
            yield _named("thread", f"{lane} {number + 1}" if number else lane, device.device, thread)
            for event in row:
                yield from _slice(event, thread)
            thread += 1


def _named(what: str, name: str, process: int, thread: int) -> Entry:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """Divide the events of a lane over rows in which none overlaps another."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        row = next((row for row in rows if row[-1].end <= event.start + 1e-12), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _slice(event: Event, thread: int) -> Iterator[Entry]:
    start = event.start * _MICROSECONDS
    length = max((event.end - event.start) * _MICROSECONDS, _SHORTEST if event.message is not None else 0.0)
    at = {"pid": event.device, "tid": thread}
    name = event.instruction if event.lane == "compute" else f"{event.kind} {event.axis}"
    yield {"ph": "X", "name": name, "cat": event.lane, "ts": start, "dur": length, **at, "args": _arguments(event)}
    if event.message is not None:
        arrow = {"name": "message", "cat": "message", "id": event.message, **at}
        if event.kind == SENT:
            yield {"ph": "s", "ts": start, **arrow}
        elif event.kind == RECEIVED:
            yield {"ph": "f", "bp": "e", "ts": start + length / 2, **arrow}


def _arguments(event: Event) -> Entry:
    if event.lane == "compute":
        return {"stage": event.stage, "ranks": ranks_text(event.ranks)}
    groups = [ranks_text(group) for group in event.groups[:_GROUPS]]
    more = len(event.groups) - len(groups)
    return {
        "instruction": event.instruction,
        "direction": event.direction,
        "bytes of a rank": event.bytes,
        "bytes": event.total_bytes,
        "dtype": event.dtype,
        "groups": "; ".join(groups) + (f" and {more} more" if more else ""),
        "module": event.module,
        "where": event.where,
    }
