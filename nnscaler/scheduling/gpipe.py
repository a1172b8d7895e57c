"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from nnscaler.scheduling.schedule import Instruction, Schedule, ScheduleKind, stage_devices


def gpipe(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes: simple, and every micro-batch is live at once.

    Backward passes run in the order of micro-batches, as in the other schedules, so that gradients are summed in the
    same order under all of them.
    """
    orders = tuple(
        (
            *(Instruction("F", s, m) for s in range(device, devices * chunks, devices) for m in range(micro_batches)),
            *(
                Instruction("B", s, m)
                for s in reversed(range(device, devices * chunks, devices))
                for m in range(micro_batches)
            ),
        )
        for device in range(devices)
    )
    return Schedule("gpipe", stage_devices(devices, chunks), micro_batches, orders)


GPIPE = ScheduleKind(
    "gpipe",
    "GPipe",
    gpipe,
    chunks=1,
    in_flight=lambda device, devices, micro_batches: micro_batches,
    repeats=lambda devices, micro_batches: micro_batches - 1,
)
