"""Zero bubble schedules against the figures that were published of them, and against lower bounds.

F = I = W = 1 of a stage, so B = 2: what `simulate` takes where no costs are given.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.instructions import Instruction
from nnscaler.scheduling.dependencies import chain, dependencies
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.schedule import Schedule
from nnscaler.scheduling.timeline import PassCosts, format_timeline, simulate

ZB_H1 = """\
device 0 | F0.0 F0.1 F0.2 .    .    I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
device 1 | .    F1.0 F1.1 .    I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3
device 2 | .    .    F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3
"""
ZB_V = """\
device 0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 .
device 1 | .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
"""
DUALPIPE_V = """\
device 0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 ---- F3.2 B0.0 ---- B3.2 ---- F3.3 .    B0.1 ---- B3.3 ---- I0.2 W0.2 I0.3 W0.3
device 1 | .    F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 ---- F2.2 B1.0 ---- F1.3 B2.1 ---- F2.3 B1.1 ---- B2.2 ---- B1.2 ---- I2.3 I1.3 W2.3 W1.3
"""  # noqa: E501
SIZES = [(devices, m) for devices in (2, 4, 8) for m in range(devices, 4 * devices + 1)]


def made(name: str, devices: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    kind = get_schedule(name)
    return kind(devices, chunks or kind.chunks, micro_batches)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "picture"),
    [("zb-h1", 3, 4, ZB_H1), ("zb-v", 2, 3, ZB_V), ("dualpipe-v", 2, 4, DUALPIPE_V)],
)
def test_golden_timeline(name: str, devices: int, micro_batches: int, picture: str) -> None:
    text = format_timeline(simulate(made(name, devices, micro_batches)))
    assert "".join(text.splitlines(keepends=True)[:-1]) == picture


@pytest.mark.parametrize(("devices", "m"), SIZES)
def test_zb_h1(devices: int, m: int) -> None:
    """The published bubble is (p - 1) (F + I - W), the memory that of 1F1B's first device: p."""
    found = simulate(made("zb-h1", devices, m))
    assert found.makespan == 3 * m + (devices - 1) * (1 + 1 - 1)
    assert max(found.idle) == devices - 1
    assert found.peak_live == (devices,) * devices


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_few_are_split(devices: int) -> None:
    """The last backward alone is split in the memory of 1F1B, and the first d of device d besides in that of ZB-H1."""
    for m in range(devices, 4 * devices + 1):
        last, few = (made(name, devices, m) for name in ("1f1b-split", "zb-h1-few"))
        assert simulate(last).makespan == 3 * m + 3 * devices - 4
        assert simulate(few).makespan == 3 * m + 2 * devices - 3 <= simulate(last).makespan
        assert simulate(last).peak_live == simulate(made("1f1b", devices, m)).peak_live
        assert max(simulate(few).peak_live) == devices
        split = [[sum(i.kind == "W" for i in order) for order in schedule.orders] for schedule in (last, few)]
        assert split == [[0] + [1] * (devices - 1), [0, *(min(d, m - devices + d) + 1 for d in range(1, devices))]]
    for m in range(1, devices):
        assert simulate(made("zb-h1-few", devices, m)).makespan <= simulate(made("1f1b-split", devices, m)).makespan
        assert simulate(made("1f1b-split", devices, m)).makespan < simulate(made("1f1b", devices, m)).makespan


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_half_is_held_back(devices: int) -> None:
    """Halfway between the two in time, in the memory of 1F1B's first device: a pass is half of a device's."""
    for m in range(devices, 4 * devices + 1):
        half = simulate(made("zb-h1-half", devices, m))
        last, few = (simulate(made(name, devices, m)).makespan for name in ("1f1b-split", "zb-h1-few"))
        assert half.makespan == 2 * (3 * m + (5 * devices - 7) / 2) == last + few
        assert half.peak_live == tuple(2 * devices - min(d, 2 * (m - devices + d)) for d in range(devices))
        single = simulate(made("zb-h1-half:1", devices, m))
        assert single.makespan == 3 * m + (5 * devices - 6) // 2
        assert single.peak_live == tuple(devices - d + d // 2 for d in range(devices))
        if devices == 2:
            assert made("zb-h1-half:1", devices, m).orders == made("1f1b-split", devices, m).orders
    for m in range(1, devices):
        assert simulate(made("zb-h1-half", devices, m)).makespan < 2 * simulate(made("1f1b", devices, m)).makespan
        assert simulate(made("zb-h1-half:1", devices, m)).makespan < simulate(made("1f1b", devices, m)).makespan


@pytest.mark.long
@given(devices=st.integers(1, 10), m=st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_zb_h1_is_the_shortest_for_any_number_of_micro_batches(devices: int, m: int) -> None:
    """The last device starts at p - 1 and has 3 m to do; the first has its first gradient at 2 p - 1, and then m I and
    m W to do."""
    found = simulate(made("zb-h1", devices, m))
    assert found.makespan == max(3 * m + devices - 1, 2 * m + 2 * devices - 1)
    assert max(found.peak_live) == min(devices, m)


@pytest.mark.parametrize(("devices", "m"), SIZES)
def test_zb_h2(devices: int, m: int) -> None:
    """The published bubble is (p - 1) (F + I - 2 W), in 2 p - 1, for m >= 2 p - 1. For fewer, the first device idles
    from its last forward, m, until its first gradient, 2 p - 1, whatever the schedule."""
    found = simulate(made("zb-h2", devices, m))
    assert max(found.idle) == max(2 * devices - 1 - m, 0)
    if m >= 2 * devices - 1:
        assert found.idle == ((devices - 1) * (1 + 1 - 2),) * devices
        assert found.peak_live == (2 * devices - 1,) * devices
        assert found.makespan == 3 * m + devices - 1
    assert max(found.peak_live) == min(2 * devices - 1, m)


@pytest.mark.parametrize(("devices", "m"), SIZES)
def test_zb_v(devices: int, m: int) -> None:
    """A step is as short as one can be, for the last device starts at p - 1 and has 6 m to do, in the memory of 1F1B's
    first device: 2 p passes of half of it each. No device is idle between its passes for m >= 2 p - 1."""
    found = simulate(made("zb-v", devices, m))
    assert found.makespan == 6 * m + devices - 1
    if m >= 2 * devices - 1:
        assert max(found.idle) == 0
        assert found.peak_live == (2 * devices,) * devices
    assert max(found.peak_live) <= 2 * devices


@pytest.mark.long
@given(devices=st.integers(1, 10), m=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_zb_v_for_any_number_of_micro_batches(devices: int, m: int) -> None:
    """For m < p the first micro-batch alone takes 2 p passes there and 2 p back, and the others come after it."""
    found = simulate(made("zb-v", devices, m))
    assert found.makespan == 6 * m + devices - 1 if m >= devices else found.makespan <= 4 * devices + 4 * m
    assert max(found.peak_live) <= 2 * min(devices, m)


def blocks(order: tuple[Instruction, ...], last: bool) -> Iterator[tuple[Instruction, ...]]:
    """Yield the passes of a device with each pair of a forward and a backward as one, but for the last device's first,
    as DeepSeek's program has them."""
    i, apart = 0, last
    while i < len(order):
        pair = order[i : i + 2]
        if [p.kind for p in pair] == ["F", "B"] and not apart:
            yield pair
            i += 2
        else:
            apart = apart and [p.kind for p in pair] != ["F", "B"]
            yield pair[:1]
            i += 1


def makespan_of_blocks(schedule: Schedule, costs: PassCosts) -> float:
    """Return the time of a step in which a block ends as a whole."""
    waits = dependencies(schedule, chain(schedule.stages))
    rows = [list(blocks(order, d == len(schedule.orders) - 1)) for d, order in enumerate(schedule.orders)]
    ended: dict[Instruction, float] = {}
    clock = [0.0] * len(rows)
    while any(rows):
        before = len(ended)
        for device, row in enumerate(rows):
            while row and all(w in ended or w in row[0] for i in row[0] for w in waits[i]):
                block = row.pop(0)
                ready = [ended[w] for i in block for w in waits[i] if w not in block]
                clock[device] = max([clock[device], *ready]) + sum(costs.of(i) for i in block)
                ended.update((i, clock[device]) for i in block)
        assert len(ended) > before, "the blocks wait for each other"
    return max(clock)


@pytest.mark.parametrize(("devices", "m"), SIZES)
def test_dualpipe_v(devices: int, m: int) -> None:
    """The published bubble, (p - 1) (F&B + B - 3 W) with F&B = F + B where nothing overlaps, is for m >= 2 p and for
    pairs that are one block; passes that leave as they end have p - 1 less of F. Memory: 2 p + 1 passes. Three
    backward passes of five, or more, are whole."""
    schedule = made("dualpipe-v", devices, m)
    found, costs = simulate(schedule), PassCosts.alike(2 * devices)
    if m >= 2 * devices:
        assert makespan_of_blocks(schedule, costs) - 6 * m == (devices - 1) * ((1 + 2) + 2 - 3 * 1)
        assert found.makespan - 6 * m == max(found.idle) == (devices - 1) * (2 + 2 - 3 * 1)
        assert found.peak_live == (2 * devices + 1,) * devices
    assert found.makespan - 6 * m <= devices - 1 + 2 * max(2 * devices - m, 0)
    assert sum(i.kind == "B" for order in schedule.orders for i in order) >= 0.6 * 2 * devices * m
    assert max(found.peak_live) <= 2 * devices + 1


@pytest.mark.parametrize(("devices", "m"), SIZES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved(chunks: int, devices: int, m: int) -> None:
    """The published bubble is (p - 1) (F + B) of a stage, 1 / chunks of 1F1B's, for full groups of p micro-batches. A
    last group of r costs 2 (p - r) besides with two chunks."""
    more = simulate(made("interleaved", devices, m, chunks)).makespan - 3 * chunks * m - (devices - 1) * 3
    if m % devices == 0:
        assert more == 0
    elif chunks == 2:
        assert more == 2 * (devices - m % devices)


@pytest.mark.parametrize(
    "name",
    ["1f1b-split", "zb-h1", "zb-h1-few", "zb-h1-half", "zb-h1-half:1", "zb-h1-half:3", "zb-h2", "zb-v", "dualpipe-v"],
)
def test_one_device_never_idles(name: str) -> None:
    for m in range(1, 6):
        schedule = made(name, 1, m)
        assert simulate(schedule).idle == (0.0,)
        assert len(schedule.orders[0]) == len(set(schedule.orders[0]))
