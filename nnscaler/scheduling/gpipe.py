"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Schedule, ScheduleFigures, ScheduleKind
from nnscaler.transform.plan import stage_devices


def gpipe(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes: simple, and every micro-batch is live at once.

    Backward passes run in the order of micro-batches, as in the other schedules, so that gradients are summed in the
    same order under all of them.
    """
    orders = []
    for device in range(devices):
        own = range(device, devices * chunks, devices)
        forward = [Instruction("F", stage, (m,)) for stage in own for m in range(micro_batches)]
        backward = [Instruction("B", stage, (m,)) for stage in reversed(own) for m in range(micro_batches)]
        orders.append((*forward, *backward))
    return Schedule("gpipe", stage_devices(devices, chunks), micro_batches, tuple(orders))


GPIPE = ScheduleKind(
    "gpipe",
    "GPipe",
    gpipe,
    chunks=1,
    any_chunks=True,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((1.0, 1.0, 1.0),),
        in_flight=lambda device, devices, chunks, micro_batches: micro_batches,
        at_ends=lambda devices, chunks, micro_batches: (micro_batches, micro_batches),
    ),
)
