"""Schedules in the CSV form of `torch.distributed.pipelining`: one row per rank, `0F0,1F0,1B0,0I0,0W0`.

`_PipelineScheduleRuntime._load_csv(file)` of torch runs what is written here, and what its `_dump_csv` writes is read,
in both of its formats. An empty cell is idle time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from csv import reader

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.instructions import read_instruction
from nnscaler.scheduling.given_orders import GivenOrder
from nnscaler.scheduling.schedule import Schedule

FORM = (
    "write <stage><kind><micro-batch>, such as 0F0, with the kinds F (forward), B (backward), or I and W (its halves); "
    "an empty cell is idle"
)
ONE_RANK = "torch runs a stage on one rank"
_PASS = re.compile(r"([0-9]{1,9})([FBIWU])([0-9]{1,9})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# what torch puts around passes for its own communication, in its format "compute_comms"
_OWN = re.compile(r"[0-9]{1,9}(?:(?:SEND|RECV)_[FB][0-9]{1,9}|UNSHARD|RESHARD|REDUCE_GRAD)")


def read_csv(text: str, file: str) -> tuple[GivenOrder, ...]:
    """Return the orders in a CSV, one per row. Raises NnscalerError("bad_schedule") with row and column of a cell that
    is none of torch's, and of a pass whose stage is in another row."""
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    found = []
    for number, cells in enumerate(reader(lines), 1):
        words, places = [], []
        for column, cell in enumerate(cells, 1):
            for word in _passes(cell.strip(), SourceLocation(file, number), f"row {number}, column {column}"):
                words.append(word)
                places.append(f"column {column}")
        found.append(GivenOrder(tuple(words), tuple(places), f"row {number}", SourceLocation(file, number)))
    rows: dict[int, GivenOrder] = {}
    for order in found:
        for word in order.words:
            read = read_instruction(word)
            assert read is not None, "a pass in our words"
            other = rows.setdefault(read.stage, order)
            if other is not order:
                message = f"{word} is of stage {read.stage}, which is in {other.name} as well"
                raise order.wrong(file, word, message, ONE_RANK)
    return tuple(found)


def _passes(cell: str, where: SourceLocation, place: str) -> Iterator[str]:
    """Yield the passes of a cell, in our words."""
    pair = _PAIR.fullmatch(cell)
    for word in (part.strip() for part in (pair[1].split(";") if pair else [cell])):
        match = _PASS.fullmatch(word)
        if match is not None:
            yield f"{match[2]}{int(match[1])}.{int(match[3])}"
        elif word and not _OWN.fullmatch(word):
            message = f"{where.file}: {place}: {word!r} is no pass of a stage"
            raise NnscalerError("bad_schedule", message, where, FORM)


def write_csv(schedule: Schedule) -> str:
    """Return the schedule as torch reads it. Raises NnscalerError("bad_schedule") for a stage on several devices, and
    for slices of tokens, which torch has not."""
    if schedule.slices > 1:
        message = f"schedule {schedule.name} runs micro-batches in {schedule.slices} slices"
        raise NnscalerError("bad_schedule", message, help="torch runs a micro-batch whole")
    for stage, devices in enumerate(schedule.devices):
        if len(devices) > 1:
            message = f"schedule {schedule.name} has stage {stage} on the devices {list(devices)}"
            raise NnscalerError("bad_schedule", message, help=ONE_RANK)
    return "".join(",".join(f"{i.stage}{i.kind}{i.micro}" for i in order) + "\n" for order in schedule.orders)
