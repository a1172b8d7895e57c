"""Searching schedules: what is published is found again and proved, every result is legal, and brute force agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.instructions import total_order
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.search.found_schedule import violations
from nnscaler.scheduling.search.job_shop_graph import shop_of
from nnscaler.scheduling.search.problem import (
    PassBlock,
    ScheduleProblem,
    StagePlan,
    equal_stages,
    looped,
    make_problem,
    pipeline_problem,
)
from nnscaler.scheduling.search.schedule_lower_bounds import bound, memory_needed
from nnscaler.scheduling.search.search_schedule import SearchBudget, find_schedule
from nnscaler.scheduling.timeline import simulate
from tests.nnscaler.scheduling.search.problems import shortest, small_problems
from tests.nnscaler.scheduling.search.shapes import both_ways, folded, recycled, with_shared

QUICK = SearchBudget(rounds=1, states=2_000, nodes=20, variables=120, short=4)
sizes = pytest.mark.parametrize(("devices", "times"), [(2, 2), (2, 4), (4, 2), (4, 3), (8, 2), (8, 4), (16, 2)])


@sizes
def test_1f1b_is_found_again(devices: int, times: int) -> None:
    count = devices * times
    found = find_schedule(
        pipeline_problem(equal_stages(looped(devices)), count, [float(devices - d) for d in range(devices)])
    )
    assert found.certificate.gap == 0
    assert found.certificate.makespan == (count + devices - 1) * 3
    known = get_schedule("1f1b")(devices, 1, count)
    assert found.certificate.makespan == simulate(known).makespan
    assert [len(order) for order in found.schedule().orders] == [len(order) for order in known.orders]


@sizes
def test_interleaved_is_found_again_within_its_memory(devices: int, times: int) -> None:
    count = devices * times
    known = simulate(get_schedule("interleaved")(devices, 2, count))
    found = find_schedule(pipeline_problem(equal_stages(looped(devices, 2)), count, tuple(map(float, known.peak_live))))
    assert found.certificate.gap == 0
    assert found.certificate.makespan == known.makespan == count * 6 + (devices - 1) * 3
    assert simulate(found.schedule()).peak_live <= known.peak_live


@sizes
def test_zero_bubble_is_found_again(devices: int, times: int) -> None:
    count = devices * times
    # ZB-H1 fits into the memory of 1F1B's first device, and leaves the bubble (p - 1)(F + I - W)
    found = find_schedule(pipeline_problem(equal_stages(looped(devices)), count, float(devices), split=True))
    assert (found.certificate.gap, found.certificate.makespan) == (0, count * 3 + devices - 1)
    # ZB-V: no bubble but the way to the last device, and chunks of half the size, twice as many
    found = find_schedule(pipeline_problem(equal_stages(folded(devices)), count, 2.0 * devices, split=True))
    assert (found.certificate.gap, found.certificate.makespan) == (0, count * 6 + devices - 1)
    found.schedule()


@pytest.mark.parametrize(
    ("plan", "limit", "makespan"),
    [
        (equal_stages(looped(4)), 2, 51),
        (equal_stages(looped(4)), 3, 39),
        (both_ways(4), 4, 52),
        (both_ways(4), 8, 51),
        (with_shared(4, (0,)), 2, 67),
        (with_shared(4, (0, 2)), 2, 86),
        (with_shared(4, (0, 4)), 2, 86),
        (recycled(4), 2, 59),
        (recycled(4), 4, 49),
    ],
)
def test_shapes_of_tessel_are_proved(plan: StagePlan, limit: float, makespan: float) -> None:
    found = find_schedule(pipeline_problem(plan, 8, float(limit)))
    assert (found.certificate.gap, found.certificate.makespan) == (0, makespan)
    assert max(found.certificate.peaks) <= limit


@pytest.mark.long
def test_several_micro_batches_in_a_repetend_beat_one() -> None:
    """No repetend of one micro-batch is faster than 8 in this memory; the best step takes less than 6 for each more."""
    problem = pipeline_problem(with_shared(4, (0,)), 6, 3.0)
    six = find_schedule(problem, repetends=True).certificate
    four = find_schedule(replace(problem, micro_batches=4)).certificate
    assert six.gap == four.gap == 0
    assert six.repetend is not None
    assert (six.repetend.period, six.repetend.refuted) == (8, 7)
    assert six.makespan - four.makespan < 2 * 6


@pytest.mark.long
def test_a_short_step_is_repeated_in_a_long_one() -> None:
    problem = pipeline_problem(with_shared(4, (0,)), 41, 3.0)
    alone = find_schedule(problem, SearchBudget(states=100, nodes=0, short=0)).certificate
    found = find_schedule(problem, SearchBudget(states=16_000, nodes=0, short=6, segments=60)).certificate
    assert found.source.startswith("a repeated segment")
    assert found.makespan < alone.makespan
    assert found.gap == pytest.approx(1 - found.bound / found.makespan)
    assert any("repetends" in text for text in found.not_searched)


@pytest.mark.long
@given(small_problems())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_agrees(problem: ScheduleProblem) -> None:
    best = shortest(problem)
    try:
        found = find_schedule(problem)
    except NnscalerError as error:
        assert error.code == "schedule_memory"
        assert best == inf or "none of the orders tried" in error.message
        return
    assert bound(problem).makespan <= best + 1e-9
    assert found.certificate.gap == 0
    assert found.certificate.makespan == best


@pytest.mark.long
@given(small_problems(times=st.floats(0.0, 3.0)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rounded_times_bound_the_real_ones(problem: ScheduleProblem) -> None:
    try:
        found = find_schedule(problem, QUICK, repetends=True)
    except NnscalerError as error:
        assert error.code == "schedule_memory"
        return
    best = shortest(problem)
    assert found.certificate.bound <= best * (1 + 1e-9)
    assert best <= found.certificate.makespan * (1 + 1e-9)


@st.composite
def pipelines(draw: st.DrawFn) -> ScheduleProblem:
    devices = draw(st.integers(1, 4))
    shared = draw(st.lists(st.integers(0, devices), max_size=2))
    one = with_shared(devices, tuple(shared), (draw(st.integers(1, 3)), draw(st.integers(1, 4))))
    stages = equal_stages(looped(devices, draw(st.integers(1, 3))), draw(st.sampled_from([(1, 2, 1), (2, 5, 2)])))
    plan = draw(st.sampled_from([one, stages, equal_stages(folded(devices)), both_ways(devices), recycled(devices)]))
    limits = draw(st.sampled_from([3.0, 4.0, 8.0, inf]))
    lag = float(draw(st.integers(0, 1)))
    return pipeline_problem(plan, draw(st.integers(1, 6)), limits, split=draw(st.booleans()), lag=lag)


@given(pipelines())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_result_is_legal_and_never_below_its_bound(problem: ScheduleProblem) -> None:
    try:
        found = find_schedule(problem, QUICK)
    except NnscalerError as error:
        assert error.code == "schedule_memory"
        return
    certificate = found.certificate
    assert violations(problem, found.starts, found.orders) == []
    assert bound(problem).makespan <= certificate.bound <= certificate.makespan
    assert certificate.gap == pytest.approx(1 - certificate.bound / certificate.makespan)
    assert find_schedule(problem, QUICK) == found
    assert json.loads(certificate.to_json())["makespan"] == certificate.makespan


@given(pipelines())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_memory_is_never_slower_in_the_bound(problem: ScheduleProblem) -> None:
    wide = replace(problem, limits=(inf,) * problem.devices)
    try:
        tight = bound(problem)
    except NnscalerError:
        return
    assert bound(wide).makespan <= tight.makespan
    assert bound(wide).period <= tight.period


def test_too_little_memory_names_what_is_needed_and_what_suffices() -> None:
    problem = pipeline_problem(equal_stages(folded(4)), 8, [8.0, 8.0, 1.0, 8.0])
    with pytest.raises(NnscalerError) as caught:
        find_schedule(problem)
    assert caught.value.code == "schedule_memory"
    assert "no schedule fits into the 1 bytes of device 2: one micro-batch alone needs 2" in caught.value.message
    assert caught.value.help is not None
    assert "2 bytes are proved necessary there, and 2 suffice" in caught.value.help
    found = find_schedule(replace(problem, limits=(8.0, 8.0, 2.0, 8.0)), QUICK)
    assert found.certificate.peaks[2] == 2


@given(small_problems())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_necessary_memory_is_necessary_and_sufficient_memory_suffices(problem: ScheduleProblem) -> None:
    shop = shop_of(problem)
    each = [memory_needed(shop, device) for device in range(problem.devices)]
    assert shortest(replace(problem, limits=tuple(enough for _, enough in each))) < inf
    for device, (needed, enough) in enumerate(each):
        assert needed <= enough
        if needed:
            limits = [inf] * problem.devices
            limits[device] = needed - 0.5
            assert shortest(replace(problem, limits=tuple(limits))) == inf


def test_joint_stages_are_run_together() -> None:
    problem = pipeline_problem(with_shared(2, (0,)), 3)
    found = find_schedule(problem)
    shared = [[str(i) for i in order if i.stage == 0] for order in found.orders]
    assert shared[0] == shared[1]
    assert not total_order(found.orders, lambda _: ()).stuck
    made = found.schedule()
    assert (made.devices[0], made.orders) == ((0, 1), found.orders)


def test_faults_in_a_schedule_are_seen() -> None:
    problem = pipeline_problem(equal_stages(looped(2)), 3, 2.0)
    found = find_schedule(problem)
    assert violations(problem, found.starts, found.orders) == []
    early = (tuple(start - 1 for start in found.starts[0]), *found.starts[1:])
    assert any("starts at -1" in wrong for wrong in violations(problem, early, found.orders))
    swapped = (found.orders[0][::-1], found.orders[1])
    assert any("not that of its times" in wrong for wrong in violations(problem, found.starts, swapped))
    tight = replace(problem, limits=(1.0, 1.0))
    assert any("holds 2 bytes" in wrong for wrong in violations(tight, found.starts, found.orders))
    missing = (found.orders[0][:-1], found.orders[1])
    assert any("not that of its blocks" in wrong for wrong in violations(problem, found.starts, missing))
    together = (found.starts[0], found.starts[0], *found.starts[2:])
    assert any("before F0.0 has ended" in wrong for wrong in violations(problem, together, found.orders))
    flat = (*found.starts[:2], found.starts[0], found.starts[3])
    assert any("while it runs" in wrong for wrong in violations(problem, flat, found.orders))
    assert violations(problem, found.starts[:-1], found.orders) == ["not every block runs once for every micro-batch"]


def test_blocks_that_take_no_time_come_before_what_starts_with_them() -> None:
    blocks = [
        PassBlock("F", 0, (0, 2), 0.0),
        PassBlock("B", 0, (1, 2), 1.0),
        PassBlock("I", 1, (0, 1, 2), 0.0),
        PassBlock("W", 1, (0,), 1.0),
    ]
    found = find_schedule(make_problem(blocks, [(2, 3)], 1))
    assert (found.certificate.makespan, found.certificate.gap) == (1, 0)


@given(pipelines(), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_passes_that_take_no_time_or_next_to_none(problem: ScheduleProblem, data: st.DataObject) -> None:
    """Rounded sums can have such a pass start before the end of what it waits for, and its order may not."""
    time = st.sampled_from([0.0, 1e-17, 0.1, 1 / 3, 1.7])
    blocks = tuple(replace(block, duration=data.draw(time)) for block in problem.blocks)
    problem = replace(problem, blocks=blocks)
    try:
        found = find_schedule(problem, QUICK, repetends=data.draw(st.booleans()))
    except NnscalerError as error:
        assert error.code == "schedule_memory"
        return
    assert violations(problem, found.starts, found.orders) == []
    assert bound(problem).makespan <= found.certificate.makespan * (1 + 1e-9)
