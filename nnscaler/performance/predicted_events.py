"""Predict the events of a step by a cost model: every call of the communication profile, in the pass that makes it.

What communicates is what `communication.communication_volume` has; how long a pass and its lines take, and when a pass
runs, is what `predict` says. A message is received at the beginning of a pass, for as long as it travels; its sender
does not wait, so that the end at the sender takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nnscaler.communication.communicated_graph import CommunicatedGraph
from nnscaler.instructions import Kind
from nnscaler.performance.ordered_work_of_a_pass import Piece, PieceCall, Pieces
from nnscaler.performance.predict_step_time import Prediction
from nnscaler.performance.timeline_events import RECEIVED, SENT, VERSION, DeviceRanks, Event, Ranks, StepEvents


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """An event, and its place among those of one rank.

    turn   place among what its device does; calls of one turn are made in the order of their groups
    order  by group, its number in the turn, where that is another one
    """

    event: Event
    turn: tuple[int, ...]
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a device's work. `kind`: of the event that it is itself; empty: it is nothing but calls."""

    text: str
    kind: str
    stage: int
    at: tuple[int, ...]
    start: float
    stop: float
    pieces: Sequence[Piece]


def step_events(communicated: CommunicatedGraph, prediction: Prediction, until: float | None = None) -> StepEvents:
    """Return the events of a predicted step. The last one ends with the step.

    `until`: leave out instructions that end later, with their calls: in seconds; None: all are wanted.
    """
    return StepEvents(
        VERSION,
        "simulated",
        "seconds",
        prediction.seconds,
        devices_of(communicated),
        tuple(entry.event for entries in placed_events(communicated, prediction, until) for entry in entries),
    )


def devices_of(communicated: CommunicatedGraph) -> tuple[DeviceRanks, ...]:
    """Return the pipeline devices of a program."""
    return tuple(
        DeviceRanks(device, ranks, tuple(p.stage.index for p in communicated.on(device)))
        for device, ranks in enumerate(communicated.partitioned.devices)
    )


def placed_events(
    communicated: CommunicatedGraph, prediction: Prediction, until: float | None = None
) -> tuple[tuple[PlacedEvent, ...], ...]:
    """Return the events of each device, in order. `until`: as in `step_events`."""
    pieces = Pieces(communicated, prediction)
    messages: dict[tuple[int, tuple[int, ...]], int] = {}  # (place, pass) -> number
    return tuple(
        tuple(
            entry
            for number, line in enumerate(_lines(pieces, device))
            if until is None or line.stop <= until
            for entry in _laid_out(line, number, device, pieces.ranks[device], messages)
        )
        for device in range(len(pieces.ranks))
    )


def rank_calls(placed: Iterable[PlacedEvent], rank: int) -> list[tuple[Event, Ranks]]:
    """Return the calls that one rank of a device makes, in its order, each with its group."""
    found: list[tuple[tuple[int, ...], tuple[int, Ranks, str], Event, Ranks]] = []
    for entry in placed:
        event = entry.event
        for i, group in enumerate(event.groups):
            ends = {SENT: group[:1], RECEIVED: group[1:]}.get(event.kind, group)
            if rank in ends:
                within = (entry.order[i], (), "") if entry.order else (0, group, event.dtype)
                found.append((entry.turn, within, event, group))
    found.sort(key=lambda call: call[:2])
    return [(event, group) for _, _, event, group in found]


def _lines(pieces: Pieces, device: int) -> Iterator[_Line]:
    """Yield what a device does in a step: parameters are gathered, stages prepare, passes run, gradients and the loss
    are summed."""
    prediction = pieces.prediction
    programs = pieces.communicated.on(device)
    row, before = prediction.timeline.rows[device], prediction.before[device]
    # while others compute nothing it may be faster than is told in `before`
    scale = prediction.share * (min(1.0, row[0].start / before) if row and before else 1.0)
    gathered = pieces.around(device, "gather")
    now = scale * gathered.seconds
    yield _Line("gather", "", -1, (), 0.0, now, [gathered])
    for program in programs:
        prepared = pieces.prepare(device, program)
        if prepared:
            stop = now + scale * sum(piece.seconds for piece in prepared)
            stage = program.stage.index
            yield _Line(f"prepare of stage {stage}", "prepare", stage, (), now, stop, prepared)
            now = stop
    passes: dict[tuple[int, Kind], list[Piece]] = {}
    for span in row:
        i = span.instruction
        if (i.stage, i.kind) not in passes:
            passes[i.stage, i.kind] = pieces.of_pass(device, pieces.communicated.stages[i.stage], i.kind)
        yield _Line(str(i), i.kind, i.stage, i.at, span.start, span.stop, passes[i.stage, i.kind])
    now = row[-1].stop if row else now
    end = now + prediction.after[device]
    updated = any(span.instruction.kind == "U" for span in row)
    for part in ("loss",) if updated else ("loss", "gradient"):
        summed = pieces.around(device, "gradient" if part == "gradient" else "loss")
        hidden = prediction.hidden[device] if part == "gradient" else 0.0
        stop = now + prediction.share * summed.seconds - hidden
        yield _Line(part, "", -1, (), now, stop, [summed])
        now = stop
    if end - now > 1e-9 * end:
        yield _Line("step", "step", programs[0].stage.index, (), now, end, [])


def _laid_out(
    line: _Line, number: int, device: int, ranks: Ranks, messages: dict[tuple[int, tuple[int, ...]], int]
) -> Iterator[PlacedEvent]:
    """Yield the events of a line: itself, and its calls. `messages` gets the numbers of those that are new."""
    if line.kind:
        own = Event("compute", line.kind, device, ranks, line.start, line.stop, line.text, line.stage)
        yield PlacedEvent(own, (number,))
    total = sum(piece.seconds for piece in line.pieces)
    scale = (line.stop - line.start) / total if total else 0.0
    now = line.start
    for position, piece in enumerate(line.pieces):
        for made in piece.calls:
            message = None
            if made.site.part == "message":
                message = messages.setdefault((made.number, line.at), len(messages))
            event = _event(line, device, made, (now + scale * made.start, now + scale * made.end), message)
            yield PlacedEvent(event, (number, position, *made.site.at), made.site.order)
        now += scale * piece.seconds


def _event(line: _Line, device: int, made: PieceCall, span: tuple[float, float], message: int | None) -> Event:
    call = made.site.call
    return Event(
        "communication",
        made.kind,
        device,
        made.ranks,
        *span,
        line.text,
        call.stage if line.stage < 0 else line.stage,
        call.members,
        call.bytes,
        call.direction,
        call.axis,
        call.dtype,
        call.module,
        call.where,
        message,
    )
