"""Simulate a schedule by events: when each instruction runs, the bubble, and the live micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nnscaler.instructions import Instruction, StageEdge
from nnscaler.manifest import Bar, TimelineRow, TimelineRows
from nnscaler.scheduling.dependencies import chain, check_acyclic, dependencies
from nnscaler.scheduling.schedule import BACKWARD, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which an instruction runs."""

    instruction: Instruction
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated schedule. Times have the unit of the costs.

    rows        by device, its spans in order
    makespan    time until the last device finishes
    bubble      idle fraction of all devices' time until then
    peak_live   by device, the most (stage, micro-batch) pairs whose backward pass was still to come or running
    """

    rows: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    peak_live: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """By device, the time between its first pass and its last in which it runs none.

        It is what papers on zero bubble call the bubble: a device that starts and ends later than another loses nothing
        where steps follow each other.
        """
        return tuple(
            row[-1].stop - row[0].start - sum(span.stop - span.start for span in row) if row else 0.0
            for row in self.rows
        )


@dataclass(frozen=True, slots=True)
class PassCosts:
    """The time of each pass of one micro-batch, by stage.

    forward    of F
    backward   of B
    weights    of W, which is a part of `backward`; the rest of it is I
    updates    of U: of summing its gradients; (): they take no time, as the update at the end of a step
    slices     by stage and slice, the multiple of these that the pass of a slice takes; (): no pass is of a slice
    halved     how many times longer I and W together take than B
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weights: Sequence[float]
    updates: Sequence[float] = ()
    slices: Sequence[Sequence[float]] = ()
    halved: float = 1.0

    @staticmethod
    def alike(stages: int, forward: float = 1.0, backward: float = 2.0, weights: float = 1.0) -> PassCosts:
        """Return the costs of stages that are alike."""
        return PassCosts([forward] * stages, [backward] * stages, [weights] * stages)

    def of(self, instruction: Instruction) -> float:
        """Return the time of an instruction."""
        if self.slices:
            return replace(self, slices=()).of(instruction) * self.slices[instruction.stage][instruction.at[1]]
        stage = instruction.stage
        if instruction.kind == "F":
            return self.forward[stage]
        if instruction.kind == "U":
            return self.updates[stage] if self.updates else 0.0
        if instruction.kind == "B":
            return self.backward[stage]
        half = self.weights[stage] if instruction.kind == "W" else self.backward[stage] - self.weights[stage]
        return half * self.halved


def simulate(
    schedule: Schedule,
    edges: Collection[StageEdge] | None = None,
    costs: PassCosts | None = None,
    starts: Sequence[float] | None = None,
) -> Timeline:
    """Run each device's order as early as dependencies allow; communication takes no time. The devices of a stage on
    several start its passes together.

    `costs`: 1 forward, 2 backward, half of it for the weights, unless given; `edges` says which stages feed which (each
    the next one unless given); `starts`: when each device begins, 0 unless given. Raises what `check_acyclic` raises.
    """
    edges = chain(schedule.stages) if edges is None else edges
    costs = PassCosts.alike(schedule.stages) if costs is None else costs
    waits = dependencies(schedule, edges)
    rows: list[list[Span]] = [[] for _ in schedule.orders]
    finished: dict[Instruction, float] = {}
    for instruction in check_acyclic(schedule, edges):
        devices = schedule.devices[instruction.stage]
        free = [rows[d][-1].stop if rows[d] else starts[d] if starts else 0.0 for d in devices]
        start = max([*free, *(finished[d] for d in waits[instruction])])
        finished[instruction] = start + costs.of(instruction)
        for device in devices:
            rows[device].append(Span(instruction, start, finished[instruction]))
    return timeline_of(schedule, rows)


def timeline_of(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> Timeline:
    """Return the timeline with these spans, per device."""
    makespan = max((row[-1].stop for row in rows if row), default=0.0)
    busy = sum(span.stop - span.start for row in rows for span in row)
    available = makespan * len(rows)
    return Timeline(
        tuple(tuple(row) for row in rows),
        makespan,
        1 - busy / available if available else 0.0,
        tuple(sum(_ones_at_peak(schedule, device)) for device in range(len(schedule.orders))),
    )


def format_timeline(timeline: Timeline, unit: float = 1.0) -> str:
    """Draw one row per device, one column per `unit` of time.

    An instruction stands where it starts and `----` follows while it runs; `.` is idle.
    """
    columns = round(timeline.makespan / unit)
    width = max((len(str(s.instruction)) for row in timeline.rows for s in row), default=1)
    label = len(f"device {len(timeline.rows) - 1}")
    lines = []
    for device, row in enumerate(timeline.rows):
        cells = ["."] * columns
        for span in row:
            first, last = round(span.start / unit), round(span.stop / unit)
            cells[first:last] = [str(span.instruction), *["-" * width] * (last - first - 1)][: last - first]
        lines.append(f"{f'device {device}':<{label}} | " + " ".join(f"{c:<{width}}" for c in cells).rstrip())
    peaks = " ".join(map(str, timeline.peak_live))
    lines.append(f"{timeline.makespan:g} long, bubble {timeline.bubble:.1%}, live micro-batches {peaks}")
    return "\n".join(lines) + "\n"


def peak_of_stage(schedule: Schedule, stage: int, kept: int | Sequence[int] = 1, later: int = 1) -> int:
    """Return the most that one stage keeps for passes that are still to come or running, as `kept_at_peak` counts it.
    With 1 for each this is a number of micro-batches."""
    return kept_at_peak(schedule, schedule.devices[stage][0], {stage: kept}, {stage: later})[stage]


def kept_at_peak(
    schedule: Schedule, device: int, kept: Mapping[int, int | Sequence[int]], later: Mapping[int, int]
) -> dict[int, int]:
    """Return what stages of a device keep for passes that are still to come or running, at the moment when they keep
    most together.

    kept   by stage, what it keeps of a micro-batch, or of each of its slices, for its backward or both halves of it
    later  the same for W alone
    """
    return max(_held(schedule, device, kept, later), key=lambda held: sum(held.values()))


def kept_at_once(schedule: Schedule, device: int) -> frozenset[tuple[int, ...]]:
    """Return how many micro-batches each stage that a device has to itself keeps for passes that are still to come or
    running, at every moment of its order."""
    ones = {stage: 1 for stage in schedule.has(device) if len(schedule.devices[stage]) == 1}
    return frozenset(tuple(held.values()) for held in _held(schedule, device, ones, ones))


def _ones_at_peak(schedule: Schedule, device: int) -> Collection[int]:
    ones = dict.fromkeys(schedule.has(device), 1)
    return kept_at_peak(schedule, device, ones, ones).values()


def _held(
    schedule: Schedule, device: int, kept: Mapping[int, int | Sequence[int]], later: Mapping[int, int]
) -> Iterator[dict[int, int]]:
    """Yield what the stages of `kept` hold before the first pass of a device, and after each of theirs."""
    order = schedule.orders[device]
    trained = {i.stage for i in order if i.kind in BACKWARD}  # other stages keep nothing
    held = dict.fromkeys(kept, 0)
    yield dict(held)
    for step in order:
        if step.stage in held and step.stage in trained:
            own, weights = kept[step.stage], later[step.stage]
            each = own if isinstance(own, int) else own[step.at[-1] if len(own) > 1 else 0]
            held[step.stage] += {"F": each, "B": -each, "I": weights - each, "W": -weights, "U": 0}[step.kind]
            yield dict(held)


def timeline_rows(timeline: Timeline, ranks: Sequence[str], unit: float) -> TimelineRows:
    """Return the timeline in multiples of `unit`, a forward pass of the slowest stage. `ranks`: of each role."""
    rows = tuple(
        TimelineRow(role, ranks[role], tuple(_bar(s, unit) for s in spans if s.instruction.kind != "U"))
        for role, spans in enumerate(timeline.rows)
    )
    name = "forward passes of the slowest stage"
    return TimelineRows(name, rows, round(timeline.makespan / unit, 4), round(timeline.bubble, 4))


def _bar(span: Span, unit: float) -> Bar:
    step = span.instruction
    return Bar(step.kind, step.stage, step.micro, round(span.start / unit, 4), round(span.stop / unit, 4))
