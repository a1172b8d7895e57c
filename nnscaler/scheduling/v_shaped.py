"""Zero bubble schedules with two stages on each device, in the shape of a V: ZB-V and DualPipe-V.

The stages go forth over the devices and come back: device d has stage d and stage 2 p - 1 - d. So the first device has
the loss at once, and all devices hold as many activations. Figures below have F = I = W = 1 of a stage, and p devices.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Phase, Schedule, ScheduleFigures, ScheduleKind, in_phases


def v_shape(devices: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each stage where they go forth and back, `chunks` times over all devices."""
    ways = (range(devices), range(devices - 1, -1, -1))
    return tuple((device,) for chunk in range(chunks) for device in ways[chunk % 2])


def zb_v(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """No bubble on any device from its first pass to its last, in the memory of 1F1B's first device.

    Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6; in Pipeline Parallelism with Controllable Memory (Qi
    et al., 2024) it is V-ZB. For m >= p micro-batches a step takes 6 m + p - 1, the shortest there is, since the last
    device starts at p - 1. Each device holds at most 2 p passes of half a device's layers each. For m >= 2 p - 1 every
    device is busy from its first pass until its last; fewer never come to the phase that repeats, and list scheduling
    finds their orders.
    """
    places = v_shape(devices, chunks)
    if micro_batches < 2 * devices - 1:
        return Schedule("zb-v", places, micro_batches, _filled(places, micro_batches))
    orders = []
    for device in range(devices):
        below = devices - device
        phases: tuple[Phase, ...] = (
            (2 * below - 1, "F0"),
            (device, "F1 F0"),
            (below, "F1 I1 W"),
            (micro_batches - 2 * devices + 1 + device, "F0 I0 W F1 I1 W"),
            (below - 1, "I0 W F1 I1 W"),
            (device, "I0 I1"),
            (below, "I0 W"),
            (2 * device, "W"),
        )
        orders.append(in_phases((device, 2 * devices - 1 - device), phases, micro_batches))
    return Schedule("zb-v", places, micro_batches, tuple(orders))


@lru_cache(maxsize=8)
def _filled(places: tuple[tuple[int, ...], ...], micro_batches: int) -> tuple[tuple[Instruction, ...], ...]:
    """Return the orders that rules find for equal passes, in the memory of ZB-V."""
    # the search is a large import, for a command that lists names
    from nnscaler.scheduling.search.job_shop_graph import orders_of, shop_of
    from nnscaler.scheduling.search.list_scheduling import Portfolio
    from nnscaler.scheduling.search.problem import equal_stages, pipeline_problem
    from nnscaler.scheduling.search.schedule_lower_bounds import bound_of

    shop = shop_of(pipeline_problem(equal_stages(places), micro_batches, float(len(places)), split=True))
    found = Portfolio(shop)
    found.run(bound_of(shop).makespan, rounds=1)
    assert found.best is not None, "one micro-batch at a time always fits"
    return orders_of(shop, found.best.starts)


def dualpipe_v(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """DeepSeek's DualPipe cut in half: passes come in pairs of a forward and a backward of the other stage.

    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, and Qi et al., DualPipe could be better without the Dual, 2025.
    Backward is split only where that helps. The published bubble (p - 1) (F&B + B - 3 W) counts a forward and a
    backward that overlap in kernels as one block F&B, and is for m >= 2 p micro-batches. Here they run one after the
    other, so that what the forward makes goes out before the backward starts: F less each time, which leaves p - 1 in
    all (B = 2). For fewer micro-batches at most 2 (2 p - m) more are idle. Each device holds at most 2 p + 1 passes.
    """
    full = max(micro_batches, 2 * devices)
    orders = []
    for device in range(devices):
        below = devices - device - 1
        turns = ["1", "0"] * (device + 1)
        whole, split = turns[: device + 1], turns[device + 1 :]
        phases: tuple[Phase, ...] = (
            (2 * below, "F0"),
            (device + 1, "F0 F1"),
            (below, "I1 W F1"),
            (full - 2 * devices + device + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (1, " ".join([*(f"B{stage}" for stage in whole), *(f"I{stage}" for stage in split)])),
            (below, "W I0"),
            (device + 1, "W"),
        )
        orders.append(in_phases((device, 2 * devices - 1 - device), phases, micro_batches))
    return Schedule("dualpipe-v", v_shape(devices, chunks), micro_batches, tuple(orders))


ZB_V = ScheduleKind(
    "zb-v",
    "ZB-V",
    zb_v,
    chunks=2,
    places=v_shape,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5), (0.0, 1.0, -1.0)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices), 1),
        holds=lambda devices, micro_batches: micro_batches >= 2 * devices - 1,
        in_halves=lambda device, chunks: inf,
        chunks=(2,),
    ),
)
DUALPIPE_V = ScheduleKind(
    "dualpipe-v",
    "DualPipe-V",
    dualpipe_v,
    chunks=2,
    places=v_shape,
    figures=ScheduleFigures(
        ramps=lambda chunks, devices: ((0.5, 0.0, 0.0), (0.0, 1.0, -0.5)),
        in_flight=lambda device, devices, chunks, micro_batches: min(micro_batches, devices + 0.5),
        at_ends=lambda devices, chunks, micro_batches: (min(micro_batches, 2 * devices), 1),
        holds=lambda devices, micro_batches: micro_batches >= 2 * devices,
        in_halves=lambda device, chunks: inf,
        chunks=(2,),
    ),
)
