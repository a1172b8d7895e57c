"""Problems: their text, what is wrong with one, and the placements that make them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.scheduling.search.problem import (
    Dependency,
    PassBlock,
    StagePlan,
    equal_stages,
    looped,
    make_problem,
    pipeline_problem,
)
from nnscaler.scheduling.search.schedule_lower_bounds import bound
from nnscaler.scheduling.timeline import PassCosts
from tests.nnscaler.scheduling.search.shapes import both_ways, folded, recycled, with_shared

F = PassBlock("F", 0, (0,), 1.0, 4.0, 0.0)
B = PassBlock("B", 0, (0,), 2.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_problem([], [], 1), "no blocks"),
        (lambda: make_problem([F, B], [(0, 1)], 0), "0 micro-batches"),
        (lambda: make_problem([F, F], [], 1), "F0 is there twice"),
        (lambda: make_problem([F], [], 1), "on device 0 a micro-batch takes 4 bytes and gives 0 back"),
        (lambda: make_problem([F, B], [(0, 1), (1, 0)], 1), "waits for"),
        (lambda: make_problem([F, B], [(0, 2)], 1), "block 2 on block 0"),
        (lambda: make_problem([F, B], [Dependency(0, 1, -1.0)], 1), "B0 follows F0 by -1.0"),
        (lambda: make_problem([F, B], [], 1, [-1.0]), "memory limit of device 0 is -1.0"),
        (lambda: make_problem([F, B], [], 1, [float("nan")]), "memory limit of device 0 is nan"),
        (lambda: make_problem([replace(F, devices=())], [], 1, 1.0), r"F0 has the devices \[\]"),
        (lambda: make_problem([replace(F, devices=(0, 0)), B], [], 1), r"F0 has the devices \[0, 0\]"),
        (lambda: make_problem([F, replace(B, devices=(1,))], [], 1, [9.0]), "B0 is on device 1"),
        (lambda: make_problem([replace(F, duration=inf), B], [], 1), "duration of F0 is inf"),
        (lambda: make_problem([replace(F, allocates=-4.0), B], [], 1), "allocates of F0 is -4.0"),
        (lambda: StagePlan(looped(2), PassCosts.alike(3), (1.0, 1.0)), "costs of 3 stages, and 2 stages on devices"),
    ],
)
def test_what_is_wrong_with_a_problem_is_said(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(NnscalerError, match=message) as caught:
        make()
    assert caught.value.code == "bad_schedule_problem"
    assert caught.value.help


def test_placements() -> None:
    assert looped(2, 2) == ((0,), (1,), (0,), (1,))
    assert folded(2) == ((0,), (1,), (1,), (0,))
    assert with_shared(2, (0, 1)).devices == ((0, 1), (0,), (0, 1), (1,))
    assert with_shared(2, (0, 2)).devices == ((0, 1), (0,), (1,), (0, 1))
    assert both_ways(2).devices == ((0,), (1,), (1,), (0,))
    edges = {(e.before, e.after) for e in pipeline_problem(both_ways(2), 1).dependencies}
    assert (0, 1) in edges  # F0 before F1
    assert (1, 2) not in edges  # the two pipelines have nothing to do with each other


def test_stages_without_a_backward_have_none() -> None:
    problem = pipeline_problem(recycled(2, 3), 1)
    assert [str(b) for b in problem.blocks if b.kind == "B"] == ["B4", "B5"]
    held = {str(b): b.allocates for b in problem.blocks if b.allocates}
    assert held == {"F4": 1.0, "F5": 1.0}


def test_what_weights_keep_is_held_until_w() -> None:
    plan = replace(equal_stages(looped(1), memory=10.0), kept=(3.0,))
    blocks = pipeline_problem(plan, 1, split=True).blocks
    assert [(str(b), b.allocates, b.frees) for b in blocks] == [("F0", 10, 0), ("I0", 0, 7), ("W0", 0, 3)]


def test_messages_take_time_between_devices_only() -> None:
    problem = pipeline_problem(equal_stages(folded(2)), 1, lag=0.5)
    lags = {(str(problem.blocks[e.before]), str(problem.blocks[e.after])): e.lag for e in problem.dependencies}
    assert lags["F0", "F1"] == 0.5
    assert lags["F1", "F2"] == 0.0
    assert lags["B1", "B0"] == 0.5
    assert lags["F0", "B0"] == 0.0


def test_bounds_name_what_proves_them() -> None:
    problem = pipeline_problem(equal_stages(looped(4)), 8)
    found = bound(problem)
    assert (found.makespan, found.period, found.reason) == (33, 3, "the work of device 3")
    tight = bound(replace(problem, limits=(2.0,) * 4))
    assert (tight.makespan, tight.period, tight.reason) == (48, 6, "the memory of device 0")
