"""1F1B: one forward, one backward; and interleaved 1F1B, with several stages on each device."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Schedule, ScheduleFigures, ScheduleKind
from nnscaler.transform.plan import stage_devices


def one_f_one_b(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """One forward, one backward, after a warm-up: at most (devices - d) micro-batches are live on device d.

    `chunks` is 1: with more stages per device it is `interleaved`.
    """
    forward = [[Instruction("F", device, (m,)) for m in range(micro_batches)] for device in range(devices)]
    backward = [[Instruction("B", device, (m,)) for m in range(micro_batches)] for device in range(devices)]
    orders = tuple(alternate(forward[d], backward[d], devices - d - 1) for d in range(devices))
    return Schedule("1f1b", stage_devices(devices, chunks), micro_batches, orders)


def one_f_one_b_of_slices(devices: int, micro_batches: int, slices: int) -> Schedule:
    """One slice forward, one slice backward: at most (devices - d - 1 + slices) slices are live on device d.

    The last device runs the slices of a micro-batch forward before it runs the last of them backward.
    """
    every = [(micro, index) for micro in range(micro_batches) for index in range(slices)]
    back = [(micro, slices - 1 - index) for micro, index in every]
    orders = tuple(
        alternate(
            [Instruction("F", device, at) for at in every],
            [Instruction("B", device, at) for at in back],
            devices - device - 1 + slices - 1,
        )
        for device in range(devices)
    )
    return Schedule("1f1b", stage_devices(devices, 1), micro_batches, orders, slices=slices)


def alternate(forward: Sequence[Instruction], backward: Sequence[Instruction], warm_up: int) -> tuple[Instruction, ...]:
    """`warm_up` forward passes, then forward and backward in turn, then the backward passes that are left."""
    ahead = min(warm_up, len(forward))
    steady = [i for pair in zip(forward[ahead:], backward, strict=False) for i in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


ONE_F_ONE_B = ScheduleKind(
    "1f1b",
    "1F1B",
    one_f_one_b,
    chunks=1,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((1.0, 1.0, 1.0),),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices - device),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, devices), 1),
    ),
    sliced=one_f_one_b_of_slices,
)


def interleaved(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with several stages (chunks) on each device: the bubble shrinks by the number of chunks.

    Micro-batches go in groups of `devices`: a device runs a group through its first stage, then through its second,
    and so on; backward in the reverse order of stages. All devices run through the same two sequences. Device d
    starts backward passes after (chunks - 1) * devices + 2 * (devices - d - 1) forward passes, when the first gradient
    can reach it. With one chunk there is no second round to keep fed: its warm-up is that of 1F1B, devices - d - 1.

    A last group that is not full would deadlock under these warm-ups. So it is filled up, and the passes of the
    micro-batches that do not exist are left out: since nothing depends on another micro-batch, what remains of an
    order without deadlock has none.
    """
    filled = range(0, micro_batches, devices)
    forward = [(chunk, m) for start in filled for chunk in range(chunks) for m in range(start, start + devices)]
    backward = [(chunks - 1 - chunk, m) for chunk, m in forward]
    slope = 1 if chunks == 1 else 2
    orders = []
    for device in range(devices):
        order = alternate(
            [Instruction("F", chunk * devices + device, (m,)) for chunk, m in forward],
            [Instruction("B", chunk * devices + device, (m,)) for chunk, m in backward],
            (chunks - 1) * devices + slope * (devices - device - 1),
        )
        orders.append(tuple(i for i in order if i.micro < micro_batches))
    return Schedule("interleaved", stage_devices(devices, chunks), micro_batches, tuple(orders))


def _in_flight(device: int, devices: int, chunks: int, micro_batches: int) -> float:
    """Return how many micro-batches of all of a device's layers are live at once."""
    ahead = (chunks - 1) * devices + 2 * (devices - device) - 1
    return min(chunks * micro_batches, ahead) / chunks


# with one stage on each device it is 1F1B
INTERLEAVED = ScheduleKind(
    "interleaved",
    "interleaved",
    interleaved,
    chunks=2,
    any_chunks=True,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((1 / chunks, 1 / chunks, 1 / chunks),),
        in_flight=_in_flight,
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices), 1),
        holds=lambda devices, micro_batches: micro_batches % devices == 0,  # a last group that is not full costs more
        chunks=tuple(range(2, 9)),
    ),
)
