"""Zero bubble schedules with one stage on each device: ZB-H1 and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism,
2023).

Backward is split: `I` computes what the stage before waits for, and `W`, for which only the update waits, fills what
would be a bubble. Figures below have F = I = W = 1 and p devices.
"""

from __future__ import annotations

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Schedule, ScheduleFigures, ScheduleKind, in_phases
from nnscaler.transform.plan import stage_devices


def zb_h1(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with its backward passes split: a third of its bubble, in the memory of its first device.

    A step takes 3 m + p - 1 for m >= p micro-batches: the published bubble (p - 1) (F + I - W). That is the shortest
    there is, since the last device cannot start before p - 1; for fewer micro-batches it takes 2 m + 2 p - 1, and that
    is the shortest too. Each device holds at most p micro-batches until their W.
    """
    orders = tuple(_held_back(device, devices - device, device, micro_batches) for device in range(devices))
    return Schedule("zb-h1", stage_devices(devices, chunks), micro_batches, orders)


def zb_h2(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """No bubble on any device from its first pass to its last, for the memory of 2 p - 1 micro-batches on each.

    For m >= 2 p - 1 micro-batches every device is busy from its first pass until its last: the published bubble
    (p - 1) (F + I - 2 W). For fewer, 2 p - 1 - m are idle on the first device, whose first gradient comes after so
    many forwards. Device d starts d later than the first and ends d later: the gain over ZB-H1 is there where steps
    follow each other without a barrier.
    """
    orders = tuple(
        _held_back(device, 2 * (devices - device) - 1, 2 * device, micro_batches) for device in range(devices)
    )
    return Schedule("zb-h2", stage_devices(devices, chunks), micro_batches, orders)


def _held_back(stage: int, ahead: int, held: int, micro_batches: int) -> tuple[Instruction, ...]:
    """Return the order of a device that runs `ahead` forwards first and keeps `held` W until there is no more to do."""
    left = max(micro_batches - ahead - held, 0)
    phases = ((ahead, "F0"), (held, "I0 F0"), (left, "I0 W F0"), (ahead, "I0 W"), (held, "W"))
    return in_phases((stage,), phases, micro_batches)


ZB_H1 = ScheduleKind(
    "zb-h1",
    "ZB-H1",
    zb_h1,
    chunks=1,
    figures=ScheduleFigures(
        ramps=lambda chunks: ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, -1.0)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, devices),) * 2,
        holds=lambda devices, micro_batches: micro_batches >= devices,
    ),
)
ZB_H2 = ScheduleKind(
    "zb-h2",
    "ZB-H2",
    zb_h2,
    chunks=1,
    figures=ScheduleFigures(
        ramps=lambda chunks: ((1.0, 0.0, 0.0), (1.0, 1.0, -2.0)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, 2 * devices - 1),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices - 1),) * 2,
        holds=lambda devices, micro_batches: micro_batches >= 2 * devices - 1,
    ),
)
