"""Schedules: for every device one total order of the forward and backward passes it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc

from nnscaler.errors import NnscalerError
from nnscaler.instructions import FORM, Instruction, Kind, read_instruction

BACKWARD: tuple[Kind, ...] = ("B", "I", "W")


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of passes for every device.

    A device is a group of ranks that run the same stages. `nnscaler.scheduling.dependencies.check_acyclic` checks that
    a schedule is complete and cannot deadlock.

    name            of the kind of schedule
    devices         the device of each stage
    micro_batches   number of micro-batches
    orders          by device, its instructions in order
    untrained       stages that no gradient reaches: they have no backward passes
    """

    name: str
    devices: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Instruction, ...], ...]
    untrained: frozenset[int] = frozenset()

    @property
    def stages(self) -> int:
        return len(self.devices)

    def without_backward(self, stages: Collection[int]) -> Schedule:
        """Return the schedule without the backward passes of the stages that no gradient reaches: these."""
        orders = tuple(tuple(i for i in order if i.kind == "F" or i.stage not in stages) for order in self.orders)
        return replace(self, orders=orders, untrained=frozenset(stages))

    def forward_only(self) -> Schedule:
        """Return the schedule without its backward passes, for a model without a loss."""
        return self.without_backward(range(self.stages))

    def text(self, device: int) -> str:
        """Return one device's order as it stands in a rank program: `F0.0 F0.1 B0.0 ...`."""
        return " ".join(map(str, self.orders[device]))


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleKind:
    """A schedule that can be asked for by name, and what a planner may assume of it.

    The last two fields are for one stage on each device.

    name        by which it is asked for
    title       in reports
    orders      (devices, chunks, micro-batches) -> the schedule
    chunks      stages on each device of a pipeline where no number is asked for
    in_flight   (device, devices, micro-batches) -> the most micro-batches whose backward pass is still to come there
    repeats     (devices, micro-batches) -> how often the slowest stage counts beside the sum of all stages
    """

    name: str
    title: str
    orders: Callable[[int, int, int], Schedule]
    chunks: int
    in_flight: Callable[[int, int, int], int]
    repeats: Callable[[int, int], int]

    def __call__(self, devices: int, chunks: int, micro_batches: int) -> Schedule:
        """Return the order of every device."""
        return self.orders(devices, chunks, micro_batches)

    @property
    def summary(self) -> str:
        return (getdoc(self.orders) or "").split("\n")[0]

    def step_seconds(self, seconds: Sequence[float], micro_batches: int) -> float:
        """Return the seconds of a step, by the seconds of a micro-batch in every stage, forward and backward.

        One micro-batch goes through all stages, and the slowest stage runs the others. This is exact for equal stages;
        unlike ones take at most this where backward takes the same multiple of forward in all of them.
        """
        return sum(seconds) + self.repeats(len(seconds), micro_batches) * max(seconds)


def parse_order(text: str) -> tuple[Instruction, ...]:
    """Read the text of one device's order. Raises NnscalerError("bad_schedule") for a word that is no instruction."""
    order = []
    for word in text.split():
        read = read_instruction(word)
        if read is None:
            raise NnscalerError("bad_schedule", f"{word!r} is not an instruction of a schedule", help=FORM)
        order.append(read)
    return tuple(order)


def stage_devices(devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each of `devices * chunks` stages: stage s runs on device s % devices."""
    return tuple(stage % devices for stage in range(devices * chunks))
