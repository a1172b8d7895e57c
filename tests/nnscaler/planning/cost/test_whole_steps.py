"""Overheads found again from steps that were made of them."""

from __future__ import annotations

import pytest

from nnscaler.performance.time_steps import WholeStep, overheads_of, statement_and_step

STATEMENT, AGAIN, STEP = 1e-5, 2e-5, 1e-3


def step(statements: int, again: int, operators: float, part: float = 1.0) -> WholeStep:
    took = part * operators + (statements + again) * STATEMENT + again * AGAIN + STEP
    return WholeStep(statements, again, operators, took)


def test_overheads_are_found_again() -> None:
    steps = [step(100, 0, 0.01), step(600, 0, 0.03), step(100, 60, 0.015)]
    alone = steps[0].took
    found = overheads_of(steps, {1: alone, 2: 1.5 * alone, 4: 3 * alone}, 4)
    assert (found.statement, found.again, found.step) == pytest.approx((3 * STATEMENT, 3 * AGAIN, 3 * STEP))
    assert found.crowding == pytest.approx((1.0, 1.5, 2.25, 3.0))


def test_operators_that_were_disturbed_when_they_were_measured() -> None:
    """They seem to take longer than the step. The step is believed: all ranks at once take what they took."""
    one = WholeStep(100, 0, 0.03, 0.02)
    found = overheads_of([one], {1: 0.02, 2: 0.05}, 2)
    assert found.statement == found.step == 0.0
    assert found.crowding == pytest.approx((0.02 / 0.03, 0.05 / 0.03)) and found.relief(1) == pytest.approx(0.4)


def test_crowding_never_falls() -> None:
    one = step(100, 0, 0.01)
    found = overheads_of([one], {1: one.took, 2: 2 * one.took, 4: 1.5 * one.took}, 4)
    assert found.crowding == (1.0, 2.0, 2.0, 2.0) and found.again == 0.0


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([(100, 0.003), (200, 0.005)], (2e-5, 1e-3)),
        ([(200, 0.005), (100, 0.003)], (2e-5, 1e-3)),
        ([(100, 0.003)], (3e-5, 0.0)),
        ([(100, -0.003)], (0.0, 0.0)),
        ([(100, 0.005), (200, 0.003)], (0.0, 0.004)),
        ([(100, 0.001), (200, 0.004)], (2e-5, 0.0)),
    ],
)
def test_statement_and_step(runs: list[tuple[int, float]], found: tuple[float, float]) -> None:
    assert statement_and_step(runs) == pytest.approx(found)
