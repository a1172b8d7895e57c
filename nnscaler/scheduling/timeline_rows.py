"""A timeline as data for a picture: per role, the bars of its forward and backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnscaler.scheduling.schedule import Instruction
from nnscaler.scheduling.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Bar:
    """When an instruction runs."""

    instruction: Instruction
    start: float
    end: float

    def as_dict(self) -> dict[str, Any]:
        step = self.instruction
        return {"kind": step.kind, "stage": step.stage, "micro": step.micro, "start": self.start, "end": self.end}


@dataclass(frozen=True, slots=True)
class Row:
    """The bars of one role. `ranks`: as text."""

    role: int
    ranks: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class TimelineRows:
    """A timeline for drawing.

    unit       the meaning of one unit of time, in words
    rows       one per role
    makespan   in units
    bubble     the idle fraction
    """

    unit: str
    rows: tuple[Row, ...]
    makespan: float
    bubble: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        rows = [{"role": r.role, "ranks": r.ranks, "bars": [b.as_dict() for b in r.bars]} for r in self.rows]
        return {"unit": self.unit, "rows": rows, "makespan": self.makespan, "bubble": self.bubble}


def timeline_rows(timeline: Timeline, ranks: Sequence[str], unit: float, name: str) -> TimelineRows:
    """Return the timeline in multiples of `unit`, which is called `name`. `ranks`: of each role."""

    def scaled(time: float) -> float:
        return round(time / unit, 4)

    rows = tuple(
        Row(role, ranks[role], tuple(Bar(s.instruction, scaled(s.start), scaled(s.stop)) for s in spans))
        for role, spans in enumerate(timeline.rows)
    )
    return TimelineRows(name, rows, scaled(timeline.makespan), round(timeline.bubble, 4))
