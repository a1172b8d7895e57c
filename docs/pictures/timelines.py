"""Timelines of schedules, from the simulation that `nnscaler schedule` prints."""

from __future__ import annotations

from collections.abc import Sequence

from docs.pictures.svg import Picture, rect, words
from nnscaler.scheduling.registry import SCHEDULES, get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, Timeline, simulate
from verify.report_formats.html.timeline import color, hue, ink

LEFT, NAMES, UNIT, ROW = 24, 74, 26, 25
NARROWEST = 10  # pixels of a bar with a number
DEVICES, MICRO_BATCHES = 4, 8


def draw_two() -> Picture:
    """Return 1F1B above ZB-H1: what the halves of a backward are good for."""
    names = ("1f1b", "zb-h1")
    return _picture(names, "A backward in two halves fills the bubble: 1F1B and ZB-H1")


def draw_zoo() -> Picture:
    """Return every schedule of the registry that trains each stage in a step of these devices and micro-batches."""
    kinds = SCHEDULES.values()
    names = [k.name for k in kinds if not k.stream and not k.shares and not _made(k.name).untrained]
    title = f"The schedules of nnscaler list schedules: {DEVICES} devices, {MICRO_BATCHES} micro-batches"
    return _picture(names, title)


def _picture(names: Sequence[str], title: str) -> Picture:
    timelines = {name: _simulated(name) for name in names}
    longest = max(timeline.makespan for timeline in timelines.values())
    pieces = [words(LEFT, 34, title, "bold", size=16), words(LEFT, 54, _legend(), "faint", size=12)]
    top = 84.0
    for name, timeline in timelines.items():
        pieces += _timeline(top, get_schedule(name).title, timeline, get_schedule(name).chunks)
        top += 30 + DEVICES * (ROW + 2) + 18
    return Picture(round(2 * LEFT + NAMES + longest * UNIT), round(top), title, tuple(pieces))


def _legend() -> str:
    kinds = "Forward (1) light, backward (2) dark; of a backward in two halves I (1) is darkest, W (1) pale"
    return f"{kinds}. The number is the micro-batch."


def _made(name: str) -> Schedule:
    kind = get_schedule(name)
    return kind(DEVICES, kind.chunks, MICRO_BATCHES)


def _simulated(name: str) -> Timeline:
    made = _made(name)
    share = DEVICES / made.stages  # of a device's layers, in a stage
    return simulate(made, costs=PassCosts.alike(made.stages, share, 2 * share, share))


def _timeline(top: float, name: str, timeline: Timeline, chunks: int) -> list[str]:
    live = ", ".join(f"{peak / chunks:.3g}" for peak in timeline.peak_live)
    facts = f"{timeline.makespan:g} long, idle {timeline.bubble:.1%}, micro-batches of a device alive at once: {live}"
    pieces = [words(LEFT, top + 4, name, "bold"), words(LEFT + 190, top + 4, facts, "faint", size=12)]
    start = LEFT + NAMES
    for device, row in enumerate(timeline.rows):
        y = top + 16 + device * (ROW + 2)
        pieces.append(words(LEFT, y + 17, f"device {device}", "faint", size=12))
        pieces.append(rect(start, y, timeline.makespan * UNIT, ROW, "code"))
        for span in row:
            step, wide = span.instruction, (span.stop - span.start) * UNIT
            x = start + span.start * UNIT
            pieces.append(rect(x + 0.5, y, wide - 1, ROW, "", radius=2, fill=color(hue(step.stage), step.kind)))
            if wide >= NARROWEST:
                kind = ink(hue(step.stage), step.kind)
                pieces.append(words(x + wide / 2, y + 17, step.micro, kind, size=11, anchor="middle"))
    return pieces
