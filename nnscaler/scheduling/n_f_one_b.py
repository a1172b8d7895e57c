"""3F1B: several forward passes for one backward pass, for models that run their layers several times (recycling)."""

from __future__ import annotations

from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Schedule, ScheduleKind
from nnscaler.transform.plan import stage_devices


def n_f_one_b(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """Several forward passes, one backward: the layers run `chunks` times, the last time alone with a gradient.

    Stage `run * devices + part` is part `part` of the layers in their run `run`: its device is `part`. A device takes a
    group of micro-batches through its first run, then the same group through its second, and so on; device d starts
    backward passes after (chunks - 1) * group + chunks * (devices - d - 1) + 1 forward passes, and then runs `chunks`
    forward passes for each backward one: the forward passes of the next group fill the time in which gradients travel.
    With one run it is 1F1B.

    A micro-batch comes back to the first device `devices` forward passes after it started there, so that a group of so
    many leaves no gap. The first group takes what is left over: it is larger, and the slack that this gives lasts.

    With equal stages and m >= devices micro-batches, each device is idle for (devices - 1) * (F + B) in a step, the
    least that any order can reach: the last device starts after devices - 1 forward passes, works for
    m * (chunks * F + B), and its last gradient goes back through devices - 1 others. With fewer micro-batches each
    run after the first starts (devices - m) * F later.

    The order is of the kind that nnScaler has for AlphaFold2 (Lin et al., OSDI 2024), for any number of runs.
    """
    count = max(1, micro_batches // devices)
    first = micro_batches - (count - 1) * devices
    groups = [range(first), *(range(at, at + devices) for at in range(first, micro_batches, devices))]
    forward = [(run, m) for group in groups for run in range(chunks) for m in group]
    orders = []
    for device in range(devices):
        ahead = (chunks - 1) * first + chunks * (devices - device - 1) + 1
        left = [Instruction("F", run * devices + device, (m,)) for run, m in forward]
        order = left[:ahead]
        for m in range(micro_batches):
            order.append(Instruction("B", (chunks - 1) * devices + device, (m,)))
            order += left[ahead + m * chunks : ahead + (m + 1) * chunks]
        orders.append(tuple(order))
    untrained = frozenset(range((chunks - 1) * devices))
    return Schedule("3f1b", stage_devices(devices, chunks), micro_batches, tuple(orders), untrained)


N_F_ONE_B = ScheduleKind("3f1b", "3F1B", n_f_one_b, chunks=3, any_chunks=True)  # with one run it is 1F1B
