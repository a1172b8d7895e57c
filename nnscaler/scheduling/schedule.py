"""Schedules: for every device one total order of the forward and backward passes it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from typing import Literal

from nnscaler.errors import NnscalerError

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """The forward (F) or backward (B) pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of passes for every device.

    A device is a group of ranks that run the same stages. `nnscaler.scheduling.dependencies.check_acyclic` checks that
    a schedule is complete and cannot deadlock.

    name            of the kind of schedule
    devices         the device of each stage
    micro_batches   number of micro-batches
    orders          by device, its instructions in order
    trains          False: there are no backward passes
    """

    name: str
    devices: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Instruction, ...], ...]
    trains: bool = True

    @property
    def stages(self) -> int:
        return len(self.devices)

    def forward_only(self) -> Schedule:
        """Return the schedule without its backward passes, for a model without a loss."""
        orders = tuple(tuple(i for i in order if i.kind == "F") for order in self.orders)
        return replace(self, orders=orders, trains=False)

    def text(self, device: int) -> str:
        """Return one device's order as it stands in a rank program: `F0.0 F0.1 B0.0 ...`."""
        return format_order(self.orders[device])


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


def format_order(order: Iterable[Instruction]) -> str:
    """Write instructions as kind, stage and micro-batch: `F0.0 F0.1 B0.0 ...`."""
    return " ".join(map(str, order))


def parse_order(text: str) -> tuple[Instruction, ...]:
    """Read the text that `format_order` writes. Raises NnscalerError("bad_schedule") on anything else."""
    order = []
    for word in text.split():
        match = re.fullmatch(r"([FB])(\d+)\.(\d+)", word)
        if match is None:
            raise NnscalerError(
                "bad_schedule",
                f"{word!r} is not an instruction of a schedule",
                help="write F<stage>.<micro-batch> or B<stage>.<micro-batch>, such as F0.1",
            )
        kind: Kind = "F" if match.group(1) == "F" else "B"
        order.append(Instruction(kind, int(match.group(2)), int(match.group(3))))
    return tuple(order)


def stage_devices(devices: int, chunks: int) -> tuple[int, ...]:
    """Return the device of each of `devices * chunks` stages: stage s runs on device s % devices."""
    return tuple(stage % devices for stage in range(devices * chunks))
