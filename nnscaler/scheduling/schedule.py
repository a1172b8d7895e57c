"""Schedules: for every device one total order of the forward and backward passes it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
    """

    name: str
    devices: tuple[int, ...]
    micro_batches: int
    orders: tuple[tuple[Instruction, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.devices)

    def text(self, device: int) -> str:
        """Return one device's order as it stands in a rank program: `F0.0 F0.1 B0.0 ...`."""
        return format_order(self.orders[device])


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
