"""The output of `nnscaler timeline`: what each device does in a step, and what its communication takes."""

from __future__ import annotations

from dataclasses import dataclass

from nnscaler.cli.output.communication_profile import bytes_text, text_table
from nnscaler.timeline_events import Event, StepEvents, call_sums, covered

_MOST = 12  # kinds of calls that are listed


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The time of a device in a step, in seconds: the mean over its ranks.

    ranks, stages  as text
    computes       in passes, outside of calls
    communicates   in calls
    waits          in neither
    """

    ranks: str
    stages: str
    computes: float
    communicates: float
    waits: float


def shares(events: StepEvents) -> list[DeviceShare]:
    """Return how the time of each device is divided."""
    from nnscaler.communication.stage_communication_calls import ranks_text

    found = []
    for device in events.devices:
        own = [e for e in events.events if e.device == device.device]
        by_rank: dict[tuple[int, ...], list[Event]] = {}
        for event in own:
            by_rank.setdefault(event.ranks if events.source == "measured" else (), []).append(event)
        calls = [covered(e for e in row if e.lane == "communication") for row in by_rank.values()]
        busy = [covered(row) for row in by_rank.values()]
        rows = max(len(by_rank), 1)
        called, worked = sum(calls) / rows, sum(busy) / rows
        stages = ", ".join(map(str, device.stages))
        found.append(DeviceShare(ranks_text(device.ranks), stages, worked - called, called, events.seconds - worked))
    return found


def events_lines(events: StepEvents, title: str) -> list[str]:
    """Return the step's time, a line per device, and a line per kind of call."""
    from nnscaler.planning.cluster.description import show_seconds

    def part(seconds: float) -> str:
        return f"{show_seconds(seconds)} {seconds / events.seconds if events.seconds else 0:.0%}"

    rows = [(s.ranks, s.stages, part(s.computes), part(s.communicates), part(s.waits)) for s in shares(events)]
    lines = [f"{events.source}: {show_seconds(events.seconds)} a step, {title}"]
    lines += text_table(("ranks", "stages", "computes", "communicates", "waits"), rows, right=(2, 3, 4))
    sums = call_sums(events)
    if not sums:
        return [*lines, "communication: none"]
    calls = [
        (c.kind, c.direction, c.axis, f"{c.calls:,}", bytes_text(c.bytes), show_seconds(c.seconds), c.cause)
        for c in sums[:_MOST]
    ]
    heads = ("call", "direction", "axis", "calls of all ranks", "bytes", "a rank takes", "cause")
    more = [f"and {len(sums) - _MOST} more kinds, which take less"] if len(sums) > _MOST else []
    return [*lines, *text_table(heads, calls, right=(3, 4, 5)), *more]
