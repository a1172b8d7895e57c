"""The events of a timeline: what each device or rank does in one step, and when, simulated and measured alike.

It stands on the standard library alone: ranks record events, and pages and files are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

VERSION = 1
Ranks = tuple[int, ...]
SENT, RECEIVED = "send", "recv"  # kinds of the two ends of a message


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that ranks of a device do alike.

    lane         compute: an instruction, with the calls that it makes; communication: a call of a collective, or an
                 end of a message
    kind         F, B, I, W, U, prepare, step; of a call: all_reduce, all_gather, reduce_scatter, all_to_all, rotate,
                 send, recv
    device       pipeline device
    ranks        of the device, that do it; one where it was measured
    start, end   seconds since the step began
    instruction  that runs: `F0.1`; `prepare of stage 0`; gather, gradient, loss outside of the schedule
    stage        of the instruction
    groups       of a call: the ranks that make it together; of a message: (source, target)
    bytes        that each of `ranks` hands to the call; of a message
    direction    forward, backward, recompute, parameter, gradient or loss
    axis         of the mesh; pp for a message
    dtype        of what travels
    module       the part of the model that causes it, layers written `*`
    where        its line in the model, `file.py:31`
    message      the same number at both ends of a message
    """

    lane: str
    kind: str
    device: int
    ranks: Ranks
    start: float
    end: float
    instruction: str
    stage: int
    groups: tuple[Ranks, ...] = ()
    bytes: int = 0
    direction: str = ""
    axis: str = ""
    dtype: str = ""
    module: str = ""
    where: str = ""
    message: int | None = None

    @property
    def handed_bytes(self) -> int:
        """Bytes that all of its ranks hand to a call; of a message, those that are sent or received."""
        return self.bytes * len(self.groups if self.kind in (SENT, RECEIVED) else self.ranks)

    @property
    def total_bytes(self) -> int:
        """The same, as the communication profile counts: a message where it is sent."""
        return 0 if self.kind == RECEIVED else self.handed_bytes


@dataclass(frozen=True, slots=True)
class DeviceRanks:
    """A pipeline device. `ranks`: all that it has; `stages`: that it runs."""

    device: int
    ranks: Ranks
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The events of one step; docs/reports/events.schema.json describes it.

    version  of the schema
    source   simulated: by a cost model; measured: in a run
    unit     of the times, in words
    seconds  that the step takes
    devices  in order
    events   by device; of each in the order of their start, as the program has them
    """

    version: int
    source: str
    unit: str
    seconds: float
    devices: tuple[DeviceRanks, ...]
    events: tuple[Event, ...]

    def calls(self) -> Iterator[Event]:
        """Yield the events that communicate."""
        return (event for event in self.events if event.lane == "communication")


@dataclass(frozen=True, slots=True)
class CallSum:
    """Calls of one kind with one cause.

    kind, direction, axis  of the calls
    cause                  module and line
    calls                  of all ranks
    bytes                  that they hand over
    seconds                that a rank spends in them, the mean of all ranks
    """

    kind: str
    direction: str
    axis: str
    cause: str
    calls: int
    bytes: int
    seconds: float


def call_sums(events: StepEvents) -> tuple[CallSum, ...]:
    """Return the calls of a step by kind and cause, those that take longest first."""
    together: dict[tuple[str, str, str, str], list[Event]] = {}
    for event in events.calls():
        cause = f"{event.module} {event.where}".strip()
        together.setdefault((event.kind, event.direction, event.axis, cause), []).append(event)
    ranks = sum(len(device.ranks) for device in events.devices)
    found = [
        CallSum(
            *key,
            sum(len(event.ranks) for event in same),
            sum(event.handed_bytes for event in same),
            sum((event.end - event.start) * len(event.ranks) for event in same) / ranks,
        )
        for key, same in together.items()
    ]
    return tuple(sorted(found, key=lambda calls: -calls.seconds))


def covered(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one of the events runs."""
    total, until = 0.0, 0.0
    for start, end in sorted((event.start, event.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
