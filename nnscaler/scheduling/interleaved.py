"""Interleaved 1F1B: several stages on each device."""

from __future__ import annotations

from nnscaler.instructions import Instruction
from nnscaler.scheduling.one_f_one_b import alternate
from nnscaler.scheduling.schedule import Schedule, ScheduleFigures, ScheduleKind
from nnscaler.transform.plan import stage_devices


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
        ramps=lambda chunks: ((1 / chunks, 1 / chunks, 1 / chunks),),
        in_flight=_in_flight,
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices), 1),
        holds=lambda devices, micro_batches: micro_batches % devices == 0,  # a last group that is not full costs more
        chunks=tuple(range(2, 9)),
    ),
)
