"""Read schedules whose orders are given, as text or as instructions, with the places in them for what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from csv import reader
from dataclasses import dataclass, replace

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.instructions import FORM, SLICES, Instruction, check_order, read_instruction
from nnscaler.scheduling.pipedream import delays
from nnscaler.scheduling.schedule import BACKWARD, Schedule, ScheduleKind

Places = tuple[tuple[int, ...], ...]  # the devices of each stage


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """The order of one device, as it was given.

    words   its passes
    places  of each word, for messages: "word 3"
    name    of the order, for messages: "row 2"
    where   its line in a file; None where it comes from none
    """

    words: tuple[str, ...]
    places: tuple[str, ...]
    name: str
    where: SourceLocation | None = None

    @staticmethod
    def of_text(text: str, name: str) -> GivenOrder:
        """Return the order with this text: `F0.0 I0.0 W0.0`."""
        words = tuple(text.split())
        return GivenOrder(words, tuple(f"word {i}" for i in range(1, len(words) + 1)), name)

    def wrong(self, source: str, word: str | None, message: str, help: str | None = None) -> NnscalerError:
        """Return the error that the order `source` has: at its last such word, if it has one."""
        last = max((i for i, other in enumerate(self.words) if other == word), default=None)
        place = self.name if last is None else f"{self.name}, {self.places[last]}"
        return NnscalerError("bad_schedule", f"{source}: {place}: {message}", self.where, help)


def read_orders(orders: Sequence[GivenOrder], source: str, devices: Places | None = None) -> Schedule:
    """Return the schedule with these orders, one per device. A stage has all of its backward passes or none: only the
    model says whether gradients reach it.

    source   of the orders, for messages; the schedule's name
    devices  the devices of each stage; None: a stage is on those whose orders have it, which run it together

    Raises NnscalerError("bad_schedule") with the place of the first word that is no pass, is of a stage that is
    elsewhere or nowhere, is there twice, too early, or lacks its other half; and of an order that lacks one.
    """
    read = tuple(tuple(_instruction(order, i, source) for i in range(len(order.words))) for order in orders)
    every = {i for order in read for i in order}
    if not every:
        raise NnscalerError("bad_schedule", f"{source}: there are no passes in it", help=FORM)
    if devices is None:
        devices = _devices(orders, read, source)
    times = _times(orders, read, source)
    trained = {i.stage for i in every if i.kind in BACKWARD}
    update = next((i for i in sorted(every) if i.kind == "U"), None)
    if update is not None and len(times) > 1:
        message = f"{source}: there is an update ({update}), and passes of slices: a stream runs each batch whole"
        raise NnscalerError("bad_schedule", message, help="leave the updates away, or the slices")
    stale = () if update is None else delays(len(devices))
    untrained = frozenset(range(len(devices))) - trained
    made = Schedule(source, tuple(devices), times[0], read, untrained, stale, (*times, 1)[1])
    for device, order in enumerate(orders):
        own = made.has(device)
        passes = {stage: made.passes(stage) for stage in own}
        _, mistakes = check_order(order.words, passes)
        for mistake in mistakes[:1]:
            help = f"there are {len(devices)} stages and {times[0]} micro-batches, and this device has the stages "
            shared = [stage for stage in own if len(devices[stage]) > 1]
            more = f", of which others run {shared} with it: each of their orders has all passes" if shared else ""
            raise order.wrong(source, mistake.word, mistake.message, f"{help}{list(own)}{more}")
    return made


def _times(orders: Sequence[GivenOrder], read: Sequence[Sequence[Instruction]], source: str) -> tuple[int, ...]:
    """Return the size of each axis in time, as the largest places say. Raises NnscalerError("bad_schedule") where one
    pass has a slice and another has none."""
    first = next(i for order in read for i in order)
    for order, given in zip(read, orders, strict=True):
        for instruction in order:
            if len(instruction.at) != len(first.at):
                message = f"{instruction} and {first}: either all passes are of a slice, or none is"
                raise given.wrong(source, str(instruction), message, f"{FORM}; {SLICES}")
    return tuple(max(numbers) + 1 for numbers in zip(*(i.at for order in read for i in order), strict=True))


def _instruction(order: GivenOrder, position: int, source: str) -> Instruction:
    word = order.words[position]
    read = read_instruction(word)
    if read is None:
        place = f"{order.name}, {order.places[position]}"
        message = f"{source}: {place}: {word!r} is not an instruction of a schedule"
        raise NnscalerError("bad_schedule", message, order.where, FORM)
    if len(read.at) > 2:
        message = f"{word!r} has {len(read.at)} places in time, and a pass has a micro-batch, and a slice of it"
        raise order.wrong(source, word, message, FORM)
    return read


def _devices(orders: Sequence[GivenOrder], read: Sequence[Sequence[Instruction]], source: str) -> Places:
    """Return the devices of each stage: those whose orders have it."""
    found: dict[int, dict[int, None]] = {}
    for device, order in enumerate(read):
        for instruction in order:
            found.setdefault(instruction.stage, {})[device] = None
    missing = next(stage for stage in range(len(found) + 1) if stage not in found)
    for device, order in enumerate(read):
        for instruction in order:
            if instruction.stage > missing:
                message = f"{instruction} is of stage {instruction.stage}, and stage {missing} is nowhere"
                help = f"stages are numbered from 0: there are {sorted(found)}"
                raise orders[device].wrong(source, str(instruction), message, help)
    return tuple(tuple(found[stage]) for stage in range(len(found)))


def kind_of_orders(orders: Sequence[GivenOrder], source: str, name: str) -> ScheduleKind:
    """Return the schedule that has these orders and no others. Raises as `read_orders`."""
    made = replace(read_orders(orders, source), name=name)
    has = len(made.orders), made.micro_batches

    def only(devices: int, _: int, micro_batches: int) -> Schedule:
        if has != (devices, micro_batches):
            raise NnscalerError(
                "plan_illegal",
                f"{source} is for {has[0]} devices and {has[1]} micro-batches, and there are {devices} and "
                f"{micro_batches}",
                help=f"--plan pp={has[0]} --micro-batches {has[1]}",
            )
        return made

    stream = bool(made.staleness)
    return ScheduleKind(name, name, only, chunks=1, any_chunks=True, given=True, only=has, stream=stream)


def kind_of_function(function: Callable[[int, int, int], object], source: str, name: str) -> ScheduleKind:
    """Return the schedule that a user's function makes: (devices, chunks, micro-batches) -> a list with an order per
    device, each a text or a list of instructions, or a `Schedule`.

    Called, it raises as `read_orders`, and for what is no such list.
    """

    def made(devices: int, chunks: int, micro_batches: int) -> Schedule:
        result = function(devices, chunks, micro_batches)
        orders = result.orders if isinstance(result, Schedule) else result
        if not isinstance(orders, list | tuple) or len(orders) != devices:
            what = f"{len(orders)} orders" if isinstance(orders, list | tuple) else type(orders).__name__
            raise NnscalerError(
                "bad_schedule",
                f"{source}({devices}, {chunks}, {micro_batches}) returns {what}, not the orders of {devices} devices",
                help='return ["F0.0 B0.0", "F1.0 B1.0"], a text per device',
            )
        given = [GivenOrder.of_text(_text(order), f"order of device {d}") for d, order in enumerate(orders)]
        found = read_orders(given, source)
        if found.micro_batches != micro_batches and not found.staleness:
            message = f"{source} has passes of {found.micro_batches} micro-batches, and there are {micro_batches}"
            raise NnscalerError("bad_schedule", message, help="micro-batches are numbered from 0")
        return replace(found, name=name)

    return ScheduleKind(name, name, made, chunks=1, any_chunks=True, given=True)


def _text(order: object) -> str:
    return (
        order
        if isinstance(order, str)
        else " ".join(map(str, order))
        if isinstance(order, list | tuple)
        else repr(order)
    )


# Schedules in the CSV form of `torch.distributed.pipelining`: one row per rank, `0F0,1F0,1B0,0I0,0W0`.
# `_PipelineScheduleRuntime._load_csv(file)` of torch runs what is written here, and what its `_dump_csv` writes is
# read, in both of its formats. An empty cell is idle time.

CELL_FORM = (
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
            raise NnscalerError("bad_schedule", message, where, CELL_FORM)


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
