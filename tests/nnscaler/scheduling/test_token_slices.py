"""Slices of tokens in time: orders of passes, what they may not be, and the lengths that fill a pipeline soonest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.instructions import StagePasses, check_order
from nnscaler.planning.parse_axes import parse_axes, parse_slices
from nnscaler.scheduling.dependencies import chain, check_acyclic
from nnscaler.scheduling.registry import schedule_of
from nnscaler.scheduling.timeline import PassCosts, simulate
from nnscaler.scheduling.token_slices import best_slices
from nnscaler.transform.plan import Plan


def plan(devices: int, micro_batches: int, slices: int, schedule: str = "1f1b", chunks: int = 1) -> Plan:
    return Plan((("pp", devices),), (), micro_batches, schedule, chunks, slices=(1,) * slices)


@pytest.mark.long
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 5), st.sampled_from(["1f1b", "gpipe"]))
@settings(max_examples=60, deadline=None)
def test_every_order_is_complete_and_has_the_bubble_of_slices(p: int, m: int, s: int, name: str) -> None:
    found = schedule_of(plan(p, m, s, name))
    assert len(check_acyclic(found, chain(p))) == 2 * p * m * s
    made = simulate(found, costs=PassCosts.alike(p, 1 / s, 2 / s, 1 / s))
    assert made.bubble == pytest.approx((p - 1) / (m * s + p - 1))
    whole = simulate(schedule_of(Plan((("pp", p),), (), m, name)))
    assert made.makespan < whole.makespan or p == 1
    assert made.bubble < whole.bubble or p == 1


def test_the_order_of_1f1b_in_slices() -> None:
    found = schedule_of(plan(2, 2, 2))
    assert found.text(1) == "F1.0.0 F1.0.1 B1.0.1 F1.1.0 B1.0.0 F1.1.1 B1.1.1 B1.1.0"
    assert simulate(found).peak_live == (3, 2)


def test_interleaved_stages_run_in_slices_too() -> None:
    found = schedule_of(plan(2, 4, 3, "interleaved", 2))
    assert len(check_acyclic(found, chain(4))) == 2 * 4 * 4 * 3


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ("F0.0.1 F0.0.0 B0.0.1 B0.0.0", "runs F0.0.1 before F0.0.0: slices run forward in order"),
        ("F0.0.0 F0.0.1 B0.0.0 B0.0.1", "runs B0.0.0 before B0.0.1: slices run backward in reverse order"),
        ("F0.0.0 F0.0.1 B0.0.1", "never runs B0.0.0"),
        ("F0.0.0 F0.0.1 B0.0.1 I0.0.0 W0.0.0", "runs I0.0.0: a slice adds to the gradients"),
        ("F0.0 F0.0.1 B0.0.1 B0.0.0", "has 'F0.0', a stage or micro-batch that is not its own"),
    ],
)
def test_orders_that_slices_cannot_have(order: str, told: str) -> None:
    _, mistakes = check_order(order.split(), {0: StagePasses((1, 2))})
    assert any(told in mistake.message for mistake in mistakes), mistakes


def test_what_a_plan_cannot_be() -> None:
    with pytest.raises(NnscalerError, match="schedule zb-h1 runs backward in halves"):
        schedule_of(plan(2, 2, 2, "zb-h1"))
    own = Plan((("pp", 1),), (), 1, slices=(1, 1), orders=("F0.0 B0.0",))
    with pytest.raises(NnscalerError, match="are for 1 slices of each micro-batch, and the plan has 2"):
        schedule_of(own)
    mixed = Plan((("pp", 1),), (), 1, slices=(1, 1), orders=("F0.0.0 F0.0.1 B0.0 B0.0.0",))
    with pytest.raises(NnscalerError, match="either all passes are of a slice, or none is"):
        schedule_of(mixed)
    for text in ("pp=2,slices=1", "pp=2,slices=0:3", "slices=2,slices=3", "slices=x"):
        with pytest.raises(NnscalerError, match="slices"):
            parse_axes(text)


def test_slices_are_words_and_entries_of_plan_files() -> None:
    assert parse_slices("pp=2,slices=4") == (1, 1, 1, 1) and parse_slices("dp=2") == ()
    assert parse_slices("slices=3:3:2,pp=2") == (3, 3, 2) and parse_axes("slices=3:3:2,pp=2") == {"pp": 2}
    sliced = Plan((("pp", 2),), slices=(3, 3, 2))
    assert Plan.from_json(sliced.to_json()) == sliced and sliced.describe() == "pp=2 slices=3:3:2"
    assert "slices" not in Plan((("pp", 2),)).to_json()


def cost(length: int, before: int) -> float:
    """A pass of a slice: what a kernel takes at least, products of weights, and those with what is before."""
    return 1.0 + 0.5 * length + 0.1 * length * (before + length)


def latency(lengths: tuple[int, ...], stages: int) -> float:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    times = [cost(length, start) for length, start in zip(lengths, starts, strict=True)]
    return sum(times) + (stages - 1) * max(times)


@given(st.integers(1, 9), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_best_slices_are_best_of_all(tokens: int, stages: int) -> None:
    every = [
        tuple(b - a for a, b in pairwise((0, *(c + 1 for c in range(tokens - 1) if cuts >> c & 1), tokens)))
        for cuts in range(1 << (tokens - 1))
    ]
    found = best_slices(tokens, stages, cost)
    assert sum(found) == tokens
    assert latency(found, stages) == pytest.approx(min(latency(lengths, stages) for lengths in every))


def test_later_slices_are_shorter() -> None:
    found = best_slices(64, 4, lambda length, before: 20 + length + 0.05 * length * (before + length), step=4)
    assert found[0] > found[-1] and all(length % 4 == 0 for length in found)
    with pytest.raises(ValueError, match="multiples of 4"):
        best_slices(10, 2, cost, step=4)
