"""1F1B: one forward, one backward."""

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
        ramps=lambda chunks: ((1.0, 1.0, 1.0),),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices - device),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, devices), 1),
    ),
    sliced=one_f_one_b_of_slices,
)
