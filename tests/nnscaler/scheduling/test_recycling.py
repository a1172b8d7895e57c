"""3F1B: as fast as any order can be, for any number of runs; and backward passes that do nothing are left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.dependencies import check_acyclic
from nnscaler.scheduling.registry import SCHEDULES, schedule_of
from nnscaler.scheduling.timeline import PassCosts, format_timeline, peak_of_stage, simulate
from nnscaler.transform.plan import Plan

GOLDEN = """\
device 0 | F0.0 F0.1 F2.0 F2.1 F4.0 F4.1 F0.2 F0.3 B4.0 ---- F2.2 F2.3 .    .    F4.2 B4.1 ---- F4.3 B4.2 ---- .    B4.3 ----
device 1 | .    F1.0 F1.1 F3.0 F3.1 F5.0 B5.0 ---- F5.1 F1.2 F1.3 B5.1 ---- F3.2 F3.3 F5.2 B5.2 ---- F5.3 B5.3 ---- .    .
23 long, bubble 13.0%, live micro-batches 2 1
"""  # noqa: E501


def bound(devices: int, runs: int, micro_batches: int, forward: float, backward: float) -> float:
    """Return a time in which no order ends: what the last device waits for its first pass, runs itself, and others run
    after its last gradient; and what one micro-batch takes alone."""
    busy = (devices - 1) * (forward + backward) + micro_batches * (runs * forward + backward)
    return max(busy, devices * (runs * forward + backward))


sizes = {"devices": st.integers(1, 8), "runs": st.integers(1, 5), "micro_batches": st.integers(1, 32)}
costs = {"forward": st.integers(1, 4), "backward": st.integers(1, 8)}


def test_golden_timeline() -> None:
    found = format_timeline(simulate(SCHEDULES["3f1b"](2, 3, 4)))
    assert found == GOLDEN


@pytest.mark.long
@given(**sizes, **costs)
@settings(max_examples=150, deadline=None)
def test_no_order_is_faster(devices: int, runs: int, micro_batches: int, forward: int, backward: int) -> None:
    """The bubble is that of the lower bound where there are as many micro-batches as devices, and known otherwise."""
    schedule = SCHEDULES["3f1b"](devices, runs, micro_batches)
    spent = PassCosts.alike(devices * runs, float(forward), float(backward), backward / 2)
    found = simulate(schedule, costs=spent).makespan
    least = bound(devices, runs, micro_batches, forward, backward)
    work = micro_batches * (runs * forward + backward)
    late = (runs - 1) * max(0, devices - micro_batches) * forward
    assert found == (devices - 1) * (forward + backward) + work + late
    assert found >= least
    assert found == least or micro_batches < devices


@pytest.mark.long
@given(**sizes)
@settings(max_examples=80, deadline=None)
def test_never_slower_than_interleaved_without_the_passes_that_do_nothing(
    devices: int, runs: int, micro_batches: int
) -> None:
    schedule = SCHEDULES["3f1b"](devices, runs, micro_batches)
    other = SCHEDULES["interleaved"](devices, runs, micro_batches).without_backward(schedule.untrained)
    check_acyclic(other, {(s, s + 1) for s in range(other.stages - 1)})
    assert sorted(map(str, sum(other.orders, ()))) == sorted(map(str, sum(schedule.orders, ())))
    assert simulate(schedule).makespan <= simulate(other).makespan


def test_faster_than_interleaved() -> None:
    found = SCHEDULES["3f1b"](4, 3, 8)
    other = SCHEDULES["interleaved"](4, 3, 8)
    assert simulate(other).makespan == 81 and simulate(other.without_backward(found.untrained)).makespan == 53
    assert simulate(found).makespan == bound(4, 3, 8, 1, 2) == 49


def test_stages_without_backward_keep_nothing() -> None:
    schedule = SCHEDULES["3f1b"](2, 3, 4)
    assert [peak_of_stage(schedule, stage) for stage in range(6)] == [0, 0, 0, 0, 2, 1]
    assert simulate(schedule).peak_live == (2, 1)


def test_missing_backward_is_refused() -> None:
    plan = Plan((("pp", 2),), (), 2, "3f1b", 3)
    assert schedule_of(plan, {0, 1, 2, 3}).orders == SCHEDULES["3f1b"](2, 3, 2).orders
    with pytest.raises(
        NnscalerError, match="schedule 3f1b runs no backward on the stages 2, 3, and gradients"
    ) as error:
        schedule_of(plan, {0, 1})
    assert error.value.code == "bad_schedule"
    assert error.value.help is not None and "use schedule interleaved" in error.value.help


def test_backward_of_a_stage_without_gradient_is_left_out() -> None:
    schedule = schedule_of(Plan((("pp", 2),), (), 2, "1f1b"), {0})
    assert schedule.text(0) == "F0.0 F0.1" and schedule.text(1) == "F1.0 B1.0 F1.1 B1.1"
    check_acyclic(schedule, {(0, 1)})
    assert SCHEDULES["gpipe"](2, 1, 1).without_backward({0, 1}).text(1) == "F1.0"
