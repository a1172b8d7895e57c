"""Zero bubble schedules whose stages go over the devices once: ZB-H1 and ZB-H2 (Qi et al., Zero Bubble Pipeline
Parallelism, 2023), and what lies between 1F1B and ZB-H1, with few backward passes split.

Backward is split: `I` computes what the stage before waits for, and `W`, for which only the update waits, fills what
would be a bubble. Figures below have F = I = W = 1 and p devices.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Ramp, Schedule, ScheduleFigures, ScheduleKind, in_phases
from nnscaler.transform.plan import stage_devices


def zb_h1(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with its backward passes split: a third of its bubble, in the memory of its first device.

    A step takes 3 m + p - 1 for m >= p micro-batches: the published bubble (p - 1) (F + I - W). That is the shortest
    there is, since the last device cannot start before p - 1; for fewer micro-batches it takes 2 m + 2 p - 1, and that
    is the shortest too. Each device holds at most p micro-batches until their W.
    """
    orders = tuple(_held_back(device, devices - device, device, micro_batches) for device in range(devices))
    return Schedule("zb-h1", stage_devices(devices, chunks), micro_batches, orders)


def split_1f1b(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with the last backward pass of each device split: a W shorter, in the same memory.

    Nothing runs between the two halves, so that nothing is kept for longer; but the gradient is on its way a W earlier
    when all other devices wait for it. With F = I = W and m >= p >= 2 a step takes 3 m + 3 p - 4, and 3 m + 3 p - 3
    under 1F1B. The first device hands nothing on, and splits nothing.
    """
    orders = tuple(_few_split((device,), devices - device, 0, micro_batches) for device in range(devices))
    return Schedule("1f1b-split", stage_devices(devices, chunks), micro_batches, orders)


def zb_h1_few(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """ZB-H1 with most backward passes whole: device d splits its first d and its last one, and runs their W at the end.

    In ZB-H1 a device d keeps d W back and runs the oldest of them after each I. Here it keeps the same ones until the
    end, so that what it runs between is an I and the W of the same micro-batch: a whole backward. Two halves compute
    more than one whole, and of m micro-batches only d + 1 pay for it. The gradients of whole ones leave a W later: with
    F = I = W and m >= p >= 2 a step takes 3 m + 2 p - 3, where ZB-H1 takes 3 m + p - 1. Two devices lose nothing.
    """
    orders = tuple(_few_split((device,), devices - device, device, micro_batches) for device in range(devices))
    return Schedule("zb-h1-few", stage_devices(devices, chunks), micro_batches, orders)


def _few_split(stages: tuple[int, ...], ahead: int, held: int, micro_batches: int) -> tuple[Instruction, ...]:
    """Return the order of a device with these stages that runs `ahead` forwards first, and splits the first `held`
    backwards, of the first half of its stages where it has several, and its last one: their W come at the end. The
    device with the model's first stage hands no gradient on, and leaves its last one whole."""
    ahead = min(ahead, micro_batches)
    held = min(held, micro_batches - ahead)
    every, some = len(stages), max(len(stages) // 2, 1)
    forward = " ".join(f"F{i}" for i in range(every))
    whole, kept, split = (
        " ".join(f"{'I' if i < halves else 'B'}{i}" for i in reversed(range(every))) for halves in (0, some, every)
    )
    steady = micro_batches - ahead - held
    last = ((1, split), (held * some + every, "W")) if stages[0] else ((1, whole),)
    phases = ((ahead, forward), (held, f"{kept} {forward}"), (steady, f"{whole} {forward}"), (ahead - 1, whole), *last)
    return in_phases(stages, phases, micro_batches)


def in_a_row(devices: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage where those of a device follow each other."""
    return tuple((device,) for device in range(devices) for _ in range(chunks))


def zb_h1_half(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """`zb-h1-few` that holds back half of what that does: in the memory of 1F1B's first device, less idle than 1F1B.

    A device has two stages that follow each other, and keeps the W of the first one alone of its first d backwards:
    device d holds p - d / 2 micro-batches, and the first one p as under 1F1B. With F = I = W of a device's layers and
    m >= p >= 2 a step takes 3 m + (5 p - 7) / 2: halfway between `1f1b-split` and `zb-h1-few`. A device that has one
    stage, for few layers, keeps all W of its first d / 2 backwards instead, rounded down: 3 m + (5 p - 6) / 2, so.
    """
    rows = [tuple(range(chunks * device, chunks * (device + 1))) for device in range(devices)]
    held = [device if chunks > 1 else device // 2 for device in range(devices)]
    orders = tuple(_few_split(row, devices - d, held[d], micro_batches) for d, row in enumerate(rows))
    return Schedule("zb-h1-half", in_a_row(devices, chunks), micro_batches, orders)


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
        ramps=lambda chunks, devices: ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, -1.0)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, devices),) * 2,
        holds=lambda devices, micro_batches: micro_batches >= devices,
        in_halves=lambda device, chunks: inf,
    ),
)
ZB_H2 = ScheduleKind(
    "zb-h2",
    "ZB-H2",
    zb_h2,
    chunks=1,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((1.0, 0.0, 0.0), (1.0, 1.0, -2.0)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, 2 * devices - 1),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices - 1),) * 2,
        holds=lambda devices, micro_batches: micro_batches >= 2 * devices - 1,
        in_halves=lambda device, chunks: inf,
    ),
)


def _few_split_figures(held: Callable[[int, int], float], chunks: tuple[int, ...] = (1,)) -> ScheduleFigures:
    """Return the figures of a schedule whose orders are `_few_split`'s.

    A device runs whole backwards but for the last one, and for those whose W it keeps until the end: the last device,
    which keeps most, says how many W the first gradients leave earlier. The last gradient waits for I alone, or for
    the forwards that are still to run.

    held  (device, chunks) -> the W of all of its layers that a device keeps
    """

    def ramps(chunks: int, devices: int) -> tuple[Ramp, ...]:
        others = max(devices - 1, 1)
        kept = held(devices - 1, chunks) / others
        return ((others - 1) / others, 1.0, 1.0 - kept), (1.0, 1.0, -kept), (1.0, 0.0, 0.0)

    def in_flight(device: int, devices: int, chunks: int, micro_batches: int) -> float:
        return min(micro_batches, devices - device + held(device, chunks))

    def at_ends(devices: int, chunks: int, micro_batches: int) -> tuple[int, int]:
        last = 1 + int(held(devices - 1, chunks)) if chunks == 1 else 1  # of several stages, the last one keeps none
        return min(micro_batches, devices), min(micro_batches, last)

    return ScheduleFigures(
        ramps,
        in_flight,
        at_ends,
        holds=lambda devices, micro_batches: micro_batches >= devices,
        chunks=chunks,
        in_halves=lambda device, chunks: held(device, chunks) + 1 if device else 0.0,
    )


SPLIT_1F1B = ScheduleKind(
    "1f1b-split", "1F1B, last split", split_1f1b, chunks=1, figures=_few_split_figures(lambda device, chunks: 0)
)
ZB_H1_FEW = ScheduleKind(
    "zb-h1-few", "ZB-H1, few split", zb_h1_few, chunks=1, figures=_few_split_figures(lambda device, chunks: device)
)
ZB_H1_HALF = ScheduleKind(
    "zb-h1-half",
    "ZB-H1, half held back",
    zb_h1_half,
    chunks=2,
    any_chunks=True,
    places=in_a_row,
    figures=_few_split_figures(lambda device, chunks: device // 2 if chunks == 1 else device / 2, (1, 2)),
)
