"""Schedules: golden timelines, and properties for any number of devices, chunks and micro-batches."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction
from nnscaler.planning.parallel_configurations import Configuration, uneven_ramps
from nnscaler.scheduling.dependencies import chain, check_acyclic, dependencies
from nnscaler.scheduling.registry import SCHEDULES, check_schedule, get_schedule, planned_schedules
from nnscaler.scheduling.schedule import Schedule, parse_order
from nnscaler.scheduling.timeline import PassCosts, format_timeline, peak_of_stage, simulate
from nnscaler.transform.plan import stage_devices

GPIPE = """\
device 0 | F0.0 F0.1 F0.2 .    .    .    B0.0 ---- B0.1 ---- B0.2 ----
device 1 | .    F1.0 F1.1 F1.2 B1.0 ---- B1.1 ---- B1.2 ---- .    .
12 long, bubble 25.0%, live micro-batches 3 3
"""
ONE_F_ONE_B = """\
device 0 | F0.0 F0.1 F0.2 .    .    .    .    B0.0 ---- F0.3 B0.1 ---- .    B0.2 ---- .    B0.3 ----
device 1 | .    F1.0 F1.1 .    .    B1.0 ---- F1.2 B1.1 ---- F1.3 B1.2 ---- .    B1.3 ---- .    .
device 2 | .    .    F2.0 B2.0 ---- F2.1 B2.1 ---- F2.2 B2.2 ---- F2.3 B2.3 ---- .    .    .    .
18 long, bubble 33.3%, live micro-batches 3 2 1
"""
INTERLEAVED = """\
device 0 | F0.0 F0.1 F2.0 F2.1 F0.2 .    B2.0 ---- F0.3 B2.1 ---- F2.2 B0.0 ---- F2.3 B0.1 ---- .    B2.2 ---- .    B2.3 ---- B0.2 ---- B0.3 ----
device 1 | .    F1.0 F1.1 F3.0 B3.0 ---- F3.1 B3.1 ---- F1.2 B1.0 ---- F1.3 B1.1 ---- F3.2 B3.2 ---- F3.3 B3.3 ---- B1.2 ---- B1.3 ---- .    .
27 long, bubble 11.1%, live micro-batches 5 3
"""  # noqa: E501
INTERLACED = """\
device 0 | F0.0 F1.0 F0.1 F1.1 F3.0 B3.0 ---- .    .    F0.2 F1.2 F3.1 B3.1 ---- B1.0 ---- B0.0 ---- .    F3.2 B3.2 ---- B1.1 ---- B0.1 ---- B1.2 ---- B0.2 ----
device 1 | F0.0 .    F0.1 F2.0 F3.0 B3.0 ---- B2.0 ---- F0.2 F2.1 F3.1 B3.1 ---- B2.1 ---- B0.0 ---- F2.2 F3.2 B3.2 ---- B2.2 ---- B0.1 ---- .    .    B0.2 ----
30 long, bubble 10.0%, live micro-batches 7 5
"""  # noqa: E501
UNFILLED = """\
device 0 | F0.0 F0.1 F2.0 F2.1 F0.2 .    B2.0 ---- .    B2.1 ---- F2.2 B0.0 ---- B0.1 ---- .    B2.2 ---- .    .    B0.2 ----
device 1 | .    F1.0 F1.1 F3.0 B3.0 ---- F3.1 B3.1 ---- F1.2 B1.0 ---- B1.1 ---- F3.2 B3.2 ---- .    .    B1.2 ---- .    .
23 long, bubble 21.7%, live micro-batches 5 3
"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "devices", "chunks", "micro_batches", "text"),
    [
        ("gpipe", 2, 1, 3, GPIPE),
        ("1F1B", 3, 1, 4, ONE_F_ONE_B),
        ("interleaved", 2, 2, 4, INTERLEAVED),
        ("Interleaved", 2, 2, 3, UNFILLED),
        ("interlaced", 2, 1, 3, INTERLACED),
    ],
)
def test_golden_timeline(name: str, devices: int, chunks: int, micro_batches: int, text: str) -> None:
    assert format_timeline(simulate(get_schedule(name)(devices, chunks, micro_batches))) == text


devices_and_micros = {"devices": st.integers(1, 6), "micro_batches": st.integers(1, 14)}
names = st.sampled_from(sorted(SCHEDULES))
FEW = ["1f1b-split", "zb-h1-few", "zb-h1-half"]  # that it searches where halves of a backward take longer
PLANNED = ["1f1b", "gpipe", FEW[0], "interleaved", *FEW[1:], "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]


def build(name: str, devices: int, chunks: int, micro_batches: int) -> Schedule:
    kind = SCHEDULES[name]
    return kind(devices, chunks if kind.any_chunks else kind.chunks, micro_batches)


@pytest.mark.long
@given(name=names, chunks=st.integers(1, 4), data=st.data(), **devices_and_micros)
@settings(max_examples=150, deadline=None)
def test_complete_and_acyclic_with_any_forward_edges(
    name: str, chunks: int, data: st.DataObject, devices: int, micro_batches: int
) -> None:
    schedule = build(name, devices, chunks, micro_batches)
    stages = range(schedule.stages)
    places = [(s, m) for s in stages for m in range(micro_batches)]
    found = Counter(i for order in schedule.orders for i in order)
    assert all(times == len(schedule.devices[i.stage]) for i, times in found.items())
    kinds = {place: "".join(sorted(i.kind for i in found if (i.stage, i.micro) == place)) for place in places}
    for (stage, _), passes in kinds.items():
        update = "U" if schedule.staleness else ""
        assert passes in ({"F"} if stage in schedule.untrained else {f"BF{update}", f"FI{update}W"})
    assert sum(map(len, kinds.values())) == len(found)
    where = [tuple(d for d, order in enumerate(schedule.orders) if s in {i.stage for i in order}) for s in stages]
    assert schedule.devices == tuple(where)
    assert schedule.devices == SCHEDULES[name].places(devices, SCHEDULES[name].chunks_of(devices, len(stages)))
    skips = data.draw(st.sets(st.tuples(st.sampled_from(stages), st.sampled_from(stages)), max_size=6))
    edges = {(p, c) for p, c in skips if p < c} | (chain(schedule.stages) if data.draw(st.booleans()) else set())
    certificate = check_acyclic(schedule, edges)
    place = {instruction: i for i, instruction in enumerate(certificate)}
    assert len(place) == len(certificate) == len(found)
    for order in schedule.orders:
        assert all(place[a] < place[b] for a, b in pairwise(order))
    for instruction, waits in dependencies(schedule, edges).items():
        assert all(place[d] < place[instruction] for d in waits)


@pytest.mark.long
@given(**devices_and_micros)
@settings(max_examples=60, deadline=None)
def test_one_f_one_b_bounds(devices: int, micro_batches: int) -> None:
    schedule = SCHEDULES["1f1b"](devices, 1, micro_batches)
    found = simulate(schedule)
    assert found.peak_live == tuple(min(devices - d, micro_batches) for d in range(devices))
    assert found.makespan == 3 * (micro_batches + devices - 1)
    assert simulate(SCHEDULES["gpipe"](devices, 1, micro_batches)).makespan == found.makespan
    assert SCHEDULES["interleaved"](devices, 1, micro_batches).orders == schedule.orders
    assert SCHEDULES["3f1b"](devices, 1, micro_batches).orders == schedule.orders


passes = st.tuples(st.just(1.0), st.floats(0.7, 2.5), st.floats(0.2, 1.1))  # seconds of F, I and W


def costs_of(schedule: Schedule, times: tuple[float, float, float], unlike: list[float]) -> PassCosts:
    """The passes of stages that share the times of their device, each device's so many times as long."""
    chunks = schedule.stages // len(schedule.orders)
    f, i, w = (time / chunks for time in times)
    often = [unlike[device] for (device,) in schedule.devices]
    return PassCosts([f * n for n in often], [(i + w) * n for n in often], [w * n for n in often])


@pytest.mark.long
@given(name=st.sampled_from(PLANNED), data=st.data(), times=passes, **devices_and_micros)
@settings(max_examples=120, deadline=None)
def test_what_the_planner_assumes(
    name: str, data: st.DataObject, times: tuple[float, float, float], devices: int, micro_batches: int
) -> None:
    """Live micro-batches are exact. A step of equal stages is, too, but for V shapes (within 3.5 %); one of devices
    that differ by a quarter is no longer than 1.5 % above what is assumed."""
    kind = SCHEDULES[name]
    figures = kind.figures
    assert figures is not None
    assume(figures.holds(devices, micro_batches))
    chunks = data.draw(st.sampled_from(figures.chunks[:3]))
    schedule = kind(devices, chunks, micro_batches)
    found = simulate(schedule, costs=costs_of(schedule, times, [1.0] * devices))
    lives = [figures.in_flight(d, devices, chunks, micro_batches) for d in range(devices)]
    assert [peak / chunks for peak in found.peak_live] == pytest.approx(lives)
    first, last = figures.at_ends(devices, chunks, micro_batches)
    assert peak_of_stage(schedule, 0) <= first and peak_of_stage(schedule, schedule.stages - 1) <= last
    step = figures.step_seconds([times] * devices, micro_batches, chunks)
    shaped = kind.places is not stage_devices and name not in FEW
    assert step == pytest.approx(found.makespan, rel=0.035 if shaped else 0.007)
    c = Configuration(pp=devices, micro_batches=micro_batches, schedule=kind, chunks=chunks)
    assert c.turns * sum(times) <= step * (1 + 1e-9)
    each = data.draw(st.lists(st.floats(0.8, 1.2), min_size=devices, max_size=devices))
    unlike = simulate(schedule, costs=costs_of(schedule, times, each)).makespan
    step = figures.step_seconds([(f * n, i * n, w * n) for n in each for f, i, w in (times,)], micro_batches, chunks)
    assert unlike <= step * 1.015


@pytest.mark.long
@given(name=st.sampled_from(["1f1b", "gpipe", "interleaved"]), data=st.data(), **devices_and_micros)
@settings(max_examples=100, deadline=None)
def test_what_the_planner_assumes_of_one_stage_a_device(
    name: str, data: st.DataObject, devices: int, micro_batches: int
) -> None:
    """A step of equal stages is exact; unlike ones take no more where backward takes the same multiple of forward."""
    kind = SCHEDULES[name]
    figures = kind.figures
    assert figures is not None
    schedule = kind(devices, 1, micro_batches)
    assert simulate(schedule).makespan == figures.step_seconds([(1.0, 1.0, 1.0)] * devices, micro_batches)
    forward = [float(n) for n in data.draw(st.lists(st.integers(1, 9), min_size=devices, max_size=devices))]
    unlike = simulate(schedule, costs=PassCosts(forward, [2 * f for f in forward], forward))
    assert unlike.makespan <= figures.step_seconds([(f, f, f) for f in forward], micro_batches)
    assert unlike.makespan >= 3 * max(forward) * micro_batches


@pytest.mark.long
@given(data=st.data(), shared=st.integers(0, 2), **devices_and_micros)
@settings(max_examples=60, deadline=None)
def test_what_the_planner_assumes_of_interlaced(
    data: st.DataObject, shared: int, devices: int, micro_batches: int
) -> None:
    """Shared ends come on top of a step of the layers, and no stage has more micro-batches than it says."""
    kind = SCHEDULES["interlaced"]
    figures = kind.figures
    assert figures is not None
    schedule = kind(devices, 1, micro_batches)
    for device in range(devices):
        assert peak_of_stage(schedule, device + 1) == figures.in_flight(device, devices, 1, micro_batches)
    ends = peak_of_stage(schedule, 0), peak_of_stage(schedule, devices + 1)
    assert ends == figures.at_ends(devices, 1, micro_batches)
    alike = data.draw(st.booleans())
    one = st.just(2) if alike else st.integers(1, 9)
    forward = [shared, *data.draw(st.lists(one, min_size=devices, max_size=devices)), shared]
    found = simulate(schedule, costs=PassCosts(forward, [2 * f for f in forward], forward))
    step = figures.step_seconds([(f, f, f) for f in forward[1:-1]], micro_batches) + micro_batches * 2 * 3 * shared
    assert found.makespan == step if alike else found.makespan <= step
    assert all(row[-1].stop == found.makespan for row in found.rows), "the last pass is run by all devices"


@pytest.mark.long
@given(chunks=st.integers(1, 4), **devices_and_micros)
@settings(max_examples=60, deadline=None)
def test_interleaved_bubble_shrinks_with_chunks(chunks: int, devices: int, micro_batches: int) -> None:
    """The known bubble for full groups; never slower than 1F1B on the same work otherwise."""
    found = simulate(SCHEDULES["interleaved"](devices, chunks, micro_batches))
    if micro_batches % devices == 0:
        assert found.makespan == 3 * (chunks * micro_batches + devices - 1)
    assert found.makespan <= 3 * chunks * (micro_batches + devices - 1)
    assert all(
        peak <= (chunks - 1) * devices + (2 if chunks > 1 else 1) * (devices - d - 1) + 1
        for d, peak in enumerate(found.peak_live)
    )


@given(name=names, chunks=st.integers(1, 3), **devices_and_micros)
@settings(max_examples=30, deadline=None)
def test_text_parses_back(name: str, chunks: int, devices: int, micro_batches: int) -> None:
    schedule = build(name, devices, chunks, micro_batches)
    for device, order in enumerate(schedule.orders):
        assert parse_order(schedule.text(device)) == order


def test_the_planner_takes_schedules_with_figures_only() -> None:
    assert [kind.name for kind in planned_schedules()] == PLANNED
    for name in (*PLANNED, "search"):
        check_schedule(name, searched=True)
    for name, reason in {"3f1b": "no figures", "interlaced": "several devices"}.items():
        with pytest.raises(NnscalerError, match=reason) as error:
            check_schedule(name, searched=True)
        assert error.value.help == "name the plan: --plan dp=2,pp=2"


@pytest.mark.parametrize("name", FEW)
def test_how_many_backwards_run_in_halves(name: str) -> None:
    """A strategy takes in the ramps of these a sum of what it takes in ramps by which the others are pruned."""
    kind = SCHEDULES[name]
    figures = kind.figures
    assert figures is not None and figures.few
    for devices, chunks in product(range(2, 9), figures.chunks):
        schedule = kind(devices, chunks, 2 * devices)
        split = [sum(i.kind == "W" for i in order) / chunks for order in schedule.orders]
        assert split == [figures.in_halves(device, chunks) for device in range(devices)]
        for f, i, w in figures.ramps(chunks, devices):
            assert min(f, i) >= max(0.0, -w), "of (1, 1, -1) and (1, 0, 0), (0, 1, 0) and (0, 0, 1 / 2)"
    assert {(1.0, 1.0, -1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.5)} <= {*uneven_ramps()}


def test_text_is_kind_stage_micro() -> None:
    assert parse_order("F0.1 B12.3 I0.1.2") == (
        Instruction("F", 0, (1,)),
        Instruction("B", 12, (3,)),
        Instruction("I", 0, (1, 2)),
    )
    for word in ("X0.1", "F0", "F.1", "F0.", "f0.1", "F0.1x", "F-1.0"):
        with pytest.raises(NnscalerError, match="is not an instruction"):
            parse_order(f"F0.0 {word}")


def test_costs_and_units() -> None:
    schedule = SCHEDULES["1f1b"](2, 1, 1)
    found = simulate(schedule, costs=PassCosts([0.5, 1.0], [1.0, 1.5], [0.5, 0.5]))
    assert found.makespan == 4
    assert format_timeline(found, unit=0.5) == (
        "device 0 | F0.0 .    .    .    .    .    B0.0 ----\n"
        "device 1 | .    F1.0 ---- B1.0 ---- ---- .    .\n"
        "4 long, bubble 50.0%, live micro-batches 1 1\n"
    )


def test_deadlock_names_the_cycle() -> None:
    orders = (parse_order("F0.0 B0.0 F0.1 B0.1"), parse_order("F1.0 F1.1 B1.0 B1.1"))
    with pytest.raises(NnscalerError) as error:
        check_acyclic(Schedule("mine", ((0,), (1,)), 2, orders), chain(2))
    assert error.value.code == "schedule_deadlock"
    assert error.value.message == (
        "schedule mine deadlocks: device 0 is at B0.0 and waits for B1.0 of device 1, which comes after F1.1 there; "
        "device 1 is at F1.1 and waits for F0.1 of device 0, which comes after B0.0 there"
    )


def test_deadlock_within_one_device() -> None:
    with pytest.raises(NnscalerError, match=r"device 0 runs B0\.0 before its forward"):
        check_acyclic(Schedule("mine", ((0,),), 1, (parse_order("B0.0 F0.0"),)), ())


def test_edges_backwards_in_stages_deadlock() -> None:
    with pytest.raises(NnscalerError, match="deadlocks"):
        check_acyclic(SCHEDULES["gpipe"](3, 1, 1), {(0, 1), (1, 2), (2, 0)})


def test_a_skip_edge_can_deadlock_what_a_chain_cannot() -> None:
    orders = tuple(map(parse_order, ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1", "F2.0 F2.1 B2.1 B2.0")))
    schedule = Schedule("mine", ((0,), (1,), (2,)), 2, orders)
    check_acyclic(schedule, {(0, 1), (0, 2)})
    with pytest.raises(NnscalerError, match="device 2 is at"):
        check_acyclic(schedule, {(0, 1), (1, 2), (0, 2)})


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("F0.0 B0.0", "F1.0"), "device 1 never runs B1.0"),
        (("F0.0 F0.0 B0.0", "F1.0 B1.0"), "device 0 runs F0.0 twice"),
        (("F0.0 B0.0 F1.0", "F1.0 B1.0"), "device 0 has 'F1.0', a stage or micro-batch that is not its own"),
        (("F0.0 B0.0", "F1.0 B1.0 F1.1"), "device 1 has 'F1.1', a stage or micro-batch that is not its own"),
        (("F0.0 B0.0", "F1.0 I1.0"), "device 1 runs I1.0 and never W1.0"),
        (("F0.0 B0.0", "F1.0 W1.0"), "device 1 runs W1.0 and never I1.0"),
        (("F0.0 B0.0", "F1.0 W1.0 I1.0"), "device 1 runs W1.0 before I1.0"),
        (("F0.0 B0.0", "F1.0 I1.0 W1.0 W1.0"), "device 1 runs W1.0 twice"),
        (("F0.0 B0.0", "F1.0 B1.0 W1.0"), "device 1 runs B1.0 and W1.0: the same gradients twice"),
        (("F0.0 B0.0", "I1.0 F1.0 W1.0"), "device 1 runs I1.0 before its forward"),
    ],
)
def test_incomplete_schedules_are_refused(orders: tuple[str, str], message: str) -> None:
    with pytest.raises(NnscalerError) as error:
        check_acyclic(Schedule("mine", ((0,), (1,)), 1, tuple(map(parse_order, orders))), chain(2))
    assert error.value.code == "bad_schedule"
    assert error.value.message == f"schedule mine: {message}"


def test_unknown_names_get_a_guess() -> None:
    with pytest.raises(NnscalerError) as error:
        get_schedule("interleave")
    assert error.value.code == "unknown_schedule"
    assert error.value.help is not None and "did you mean 'interleaved'?" in error.value.help
    with pytest.raises(NnscalerError, match="no schedule 'zzz'"):
        get_schedule("zzz")


def test_numbers_of_chunks() -> None:
    with pytest.raises(NnscalerError, match="schedule 1f1b runs one stage on each device, not 2"):
        get_schedule("1f1b")(2, 2, 4)
    with pytest.raises(NnscalerError, match="schedule zb-v runs 2 stages on each device, not 1") as error:
        get_schedule("zb-v")(2, 1, 4)
    assert error.value.help is not None and '"stage_devices": [[0], [1], [1], [0]]' in error.value.help
    assert get_schedule("Interleaved:3").chunks == 3
    for name in ("interleaved:0", "interleaved:x", "interleaved:"):
        with pytest.raises(NnscalerError, match=f"no schedule '{name}'"):
            get_schedule(name)
    with pytest.raises(NnscalerError, match="schedule zb-h1 runs one stage on each device, not 2"):
        get_schedule("zb-h1:2")
