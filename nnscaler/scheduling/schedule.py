"""Schedules: for every device one total order of the forward and backward passes it runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from math import inf
from typing import Literal, cast

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, Instruction, Kind, StagePasses, read_instruction
from nnscaler.transform.plan import stage_devices

BACKWARD: tuple[Kind, ...] = ("B", "I", "W")


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of passes for every device.

    A device is a group of ranks that run the same stages; an instruction of a stage on several of them is in the order
    of each, and they run it together. `nnscaler.scheduling.dependencies.check_acyclic` checks that
    a schedule is complete and cannot deadlock.

    name            of the kind of schedule
    devices         the devices of each stage
    micro_batches   number of micro-batches
    orders          by device, its instructions in order
    untrained       stages that no gradient reaches: they have no backward passes
    staleness       of a stream, by stage: the updates that a forward goes without; (): the step ends with one update
    slices          in which each micro-batch runs; 1: it is whole
    """

    name: str
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int
    orders: tuple[tuple[Instruction, ...], ...]
    untrained: frozenset[int] = frozenset()
    staleness: tuple[int, ...] = ()
    slices: int = 1

    @property
    def times(self) -> tuple[int, ...]:
        """The size of each axis in time: micro-batches, then slices where there are some."""
        return (self.micro_batches, self.slices) if self.slices > 1 else (self.micro_batches,)

    @property
    def stages(self) -> int:
        return len(self.devices)

    def has(self, device: int) -> tuple[int, ...]:
        """Return the stages of a device."""
        return tuple(stage for stage, devices in enumerate(self.devices) if device in devices)

    def passes_of(self, stage: int) -> list[Instruction]:
        """Return the instructions of a stage, in order: the same on each of its devices."""
        return [i for i in self.orders[self.devices[stage][0]] if i.stage == stage]

    def passes(self, stage: int) -> StagePasses:
        """Return what `check_order` must find of a stage."""
        staleness = self.staleness[stage] if self.staleness else None
        backward: Literal["must", "never"] = "never" if stage in self.untrained else "must"
        return StagePasses(self.times, backward, staleness, 1 + (staleness or 0))

    def without_backward(self, stages: Collection[int]) -> Schedule:
        """Return the schedule without the backward passes of the stages that no gradient reaches: these."""
        orders = tuple(tuple(i for i in order if i.kind == "F" or i.stage not in stages) for order in self.orders)
        return replace(self, orders=orders, untrained=frozenset(stages))

    def text(self, device: int) -> str:
        """Return one device's order as it stands in a rank program: `F0.0 F0.1 B0.0 ...`."""
        return " ".join(map(str, self.orders[device]))


Ramp = tuple[float, float, float]  # how often F, I and W of a device count; B is I + W


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleFigures:
    """Figures of a schedule that a planner may assume, with F, I and W the seconds of all layers of a device.

    The device with most to do runs all of its micro-batches, and every other one adds what the first micro-batch takes
    to get through it, and the last gradient: its ramp. This is exact for equal stages and messages that take no time.

    chunks     numbers of stages on each device that may be searched
    ramps      (chunks, devices) -> what a device adds; of several forms the one that is longest
    in_flight  (device, devices, chunks, micro-batches) -> the most micro-batches of the device's layers whose backward
               is still to come or to end
    at_ends    (devices, chunks, micro-batches) -> the same, of the first and of the last stage, each by itself
    holds      (devices, micro-batches) -> whether the figures do
    in_rounds  whether the devices wait for each other after each pass, so that all take as long as the slowest
    in_halves  (device, chunks) -> how many backwards of a device, of all of its layers, run in halves, which may take
               longer than the whole; inf: all
    """

    ramps: Callable[[int, int], tuple[Ramp, ...]]
    in_flight: Callable[[int, int, int, int], float]
    at_ends: Callable[[int, int, int], tuple[int, int]]
    holds: Callable[[int, int], bool] = lambda devices, micro_batches: True
    chunks: tuple[int, ...] = (1,)
    in_rounds: bool = False
    in_halves: Callable[[int, int], float] = lambda device, chunks: 0.0

    @property
    def few(self) -> bool:
        """True where some backwards run in halves and others do not, which is for where halves do take longer."""
        return 0.0 < self.in_halves(1, self.chunks[0]) < inf

    def step_seconds(self, passes: Sequence[Ramp], micro_batches: int, chunks: int = 1) -> float:
        """Return the seconds of a step. `passes`: by device, the seconds of F, I and W of a micro-batch.

        Unlike stages are estimated: see docs/planner.md.
        """
        longest = 0.0
        if self.in_rounds:
            passes = [max(passes, key=sum)] * len(passes)
        for form in self.ramps(chunks, len(passes)):
            # what a device adds; no device takes away from the work of another one
            added = [max(0.0, sum(often * time for often, time in zip(form, own, strict=True))) for own in passes]
            busy = [micro_batches * sum(own) - more for own, more in zip(passes, added, strict=True)]
            longest = max(longest, sum(added) + max(busy))
        return longest

    def even(self, chunks: int, devices: int) -> float:
        """Return how often a device's whole pass counts at least in its ramp."""
        return max(max(0.0, min(form)) for form in self.ramps(chunks, devices))


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleKind:
    """A schedule that can be asked for. The planner searches those with figures.

    name        by which it is asked for
    title       in reports
    orders      (devices, chunks, micro-batches) -> the schedule
    chunks      stages on each device of a pipeline where no number is asked for
    any_chunks  whether there may be more or fewer of them
    places      (devices, chunks) -> the devices of each stage
    figures     what a planner may assume of it; None: it is not searched
    given       whether it is the user's: no name leads to it, so a plan that follows it holds its orders
    only        the one number of devices, and of micro-batches, that it is for; None: any
    stream      whether each micro-batch is a batch with an update of its own, so that there is no step
    within      bytes of a rank within which its orders are searched when the stages are known (inf: no limit), for
                the places that it says; None: they are those of `orders`
    sliced      (devices, micro-batches, slices) -> the schedule of slices; None: each micro-batch's run where it would
    """

    name: str
    title: str
    orders: Callable[[int, int, int], Schedule]
    chunks: int
    any_chunks: bool = False
    places: Callable[[int, int], tuple[tuple[int, ...], ...]] = stage_devices
    figures: ScheduleFigures | None = None
    given: bool = False
    only: tuple[int, int] | None = None
    stream: bool = False
    within: float | None = None
    sliced: Callable[[int, int, int], Schedule] | None = None

    def __call__(self, devices: int, chunks: int, micro_batches: int) -> Schedule:
        """Return the order of every device. Raises NnscalerError("plan_illegal") for a number of chunks that it has
        not, and for orders that are searched when the stages are known."""
        if self.within is not None:
            message = f"the orders of schedule {self.name} are searched for the stages of a program"
            help = "compile a plan under it: the plan.json of its program has them; or name a schedule"
            raise NnscalerError("plan_illegal", message, help=help)
        self.check_chunks(devices, chunks)
        return self.orders(devices, chunks, micro_batches)

    def check_chunks(self, devices: int, chunks: int) -> None:
        """Check the number of stages on each device. Raises NnscalerError("plan_illegal")."""
        if self.any_chunks or chunks == self.chunks:
            return
        runs = "one stage" if self.chunks == 1 else f"{self.chunks} stages"
        help = f"use chunks={self.chunks}, or schedule interleaved, which takes any number"
        if self.places is not stage_devices:
            lists = [list(found) for found in self.places(devices, self.chunks)]
            help = f'a plan.json says where the stages are: "stage_devices": {lists}; and --plan pp=2 puts them there'
        message = f"schedule {self.name} runs {runs} on each device, not {chunks}"
        raise NnscalerError("plan_illegal", message, help=help)

    def chunks_of(self, devices: int, stages: int) -> int:
        """Return of how many stages on each device it is asked for, to have so many stages in all."""
        return self.chunks if len(self.places(devices, self.chunks)) == stages else max(stages // devices, 1)

    @property
    def summary(self) -> str:
        return (getdoc(self.orders) or "").split("\n")[0]

    @property
    def shares(self) -> bool:
        """True where some of its stages are on several devices."""
        return any(len(devices) > 1 for devices in self.places(2, self.chunks))


def parse_order(text: str) -> tuple[Instruction, ...]:
    """Read the text of one device's order. Raises NnscalerError("bad_schedule") for a word that is no instruction."""
    order = []
    for word in text.split():
        read = read_instruction(word)
        if read is None:
            raise NnscalerError("bad_schedule", f"{word!r} is not an instruction of a schedule", help=FORM)
        order.append(read)
    return tuple(order)


Phase = tuple[int, str]  # how often; the passes, such as "F0 I1 W"


def in_phases(stages: Sequence[int], phases: Iterable[Phase], micro_batches: int) -> tuple[Instruction, ...]:
    """Return the order of a device that runs these phases.

    stages         of the device; the number in a word says which one of them
    phases         in the words `F0`, `B0` and `I0`, each of which takes the next micro-batch of its kind (B and I
                   count together), and `W`, which takes the oldest micro-batch of all whose I ran and whose W did not
    micro_batches  those after them are left out

    A schedule whose phases are for a full pipeline is filled up with micro-batches that do not exist: since no pass
    depends on another micro-batch, an order without deadlock has none either after they are left out.
    """
    counts: Counter[tuple[str, int]] = Counter()
    halves: deque[Instruction] = deque()
    order: list[Instruction] = []
    for times, pattern in phases:
        for word in pattern.split() * times:
            if word == "W":
                order.append(halves.popleft().of("W"))
                continue
            kind, stage = cast(Kind, word[0]), stages[int(word[1:])]
            key = ("F" if kind == "F" else "B", stage)
            order.append(Instruction(kind, stage, (counts[key],)))
            counts[key] += 1
            if kind == "I":
                halves.append(order[-1])
    return tuple(i for i in order if i.micro < micro_batches)
