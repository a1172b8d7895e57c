"""Schedules that are written down: GPipe, 1F1B, and what goes as 1F1B does: interleaved, interlaced, 3F1B, PipeDream."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.instructions import Instruction, Kind
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


# PipeDream: a pipeline that never drains, with an update after every batch (Narayanan et al., 2019).
# Forwards and backwards alternate as under 1F1B. Stage s of p starts p - 1 - s batches before its first gradient is
# there, so that each of its batches goes without so many updates by earlier ones. That is no synchronous training:
# W(t+1) = W(t) - lr * grad f(w_0(t-p+1), ..., w_{p-1}(t))


def pipedream(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """A stream of batches with no end, each with an update of its own, to parameters that are newer than those it read.

    Each micro-batch is a batch. Stage s keeps p - s versions of its parameters: a backward reads the one that its
    forward read.
    """
    made = one_f_one_b(devices, chunks, micro_batches)
    orders = tuple(
        tuple(step for i in order for step in ((i, i.of("U")) if i.kind == "B" else (i,))) for order in made.orders
    )
    return Schedule("pipedream", made.devices, micro_batches, orders, staleness=delays(devices))


def delays(stages: int) -> tuple[int, ...]:
    """Return the staleness of each stage: how many updates by earlier batches one that goes forward there lacks."""
    return tuple(stages - 1 - stage for stage in range(stages))


def written_for(stages: int) -> int:
    """Return for how many batches the order of a stream is written: until each device repeats itself."""
    return stages + 1


PIPEDREAM = ScheduleKind("pipedream", "PipeDream", pipedream, chunks=1, stream=True)
