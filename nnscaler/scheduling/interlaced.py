"""Interlaced 1F1B: the first and the last stage run on all devices together, the others on one each."""

from __future__ import annotations

from nnscaler.instructions import Instruction, Kind
from nnscaler.scheduling.schedule import Schedule, ScheduleFigures, ScheduleKind
from nnscaler.transform.plan import stage_devices


def around(devices: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage: all of them have the first one and the last one, and the others go round."""
    every = tuple(range(devices))
    return (every, *stage_devices(devices, chunks), every)


def interlaced(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with a stage at either end that all devices run together, such as an embedding and a head.

    The interlaced pipeline of Lin et al., nnScaler, 2024. Passes that are run together are barriers, so that devices
    work in rounds, and in each of them all run a forward, the head, and a backward: a step takes (m + p - 1) (F + B)
    and the shared passes. A micro-batch goes one device further in a round, either way, so that device d has up to
    2 (p - d) - 1 of them between forward and backward; 1F1B has p - d.
    """
    last = devices - 1
    orders: list[list[Instruction]] = [[] for _ in range(devices)]
    for number in range(micro_batches + 2 * last):
        for device, order in enumerate(orders):
            passes: tuple[tuple[Kind, int, int], ...] = (
                ("F", 0, number),
                ("F", device + 1, number - device),
                ("F", devices + 1, number - last),
                ("B", devices + 1, number - last),
                ("B", device + 1, number - 2 * last + device),
                ("B", 0, number - 2 * last),
            )
            order += [Instruction(k, stage, (micro,)) for k, stage, micro in passes if 0 <= micro < micro_batches]
    return Schedule("interlaced", around(devices, chunks), micro_batches, tuple(map(tuple, orders)))


INTERLACED = ScheduleKind(
    "interlaced",
    "interlaced 1F1B",
    interlaced,
    chunks=1,
    places=around,
    figures=ScheduleFigures(  # of the stages that are on one device; a planner adds what all devices run
        ramps=lambda chunks, devices: ((1.0, 1.0, 1.0),),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, 2 * (devices - device) - 1),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices - 1), 1),
        in_rounds=True,
    ),
)
