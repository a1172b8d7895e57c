"""Overheads found again from steps that were made of them."""

from __future__ import annotations

import pytest

from nnscaler.performance.measure_step_overheads import WholeStep, overheads_of, part_and_statement

STATEMENT, AGAIN, STEP = 1e-5, 2e-5, 1e-3


def step(statements: int, again: int, operators: float, part: float = 1.0) -> WholeStep:
    took = part * operators + (statements + again) * STATEMENT + again * AGAIN + STEP
    return WholeStep(statements, again, operators, took, STEP)


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


def test_operators_that_were_in_caches_when_they_were_measured() -> None:
    """A step takes longer than they did: in proportion to them, and not once a step."""
    steps = [step(100, 0, 0.01, 1.3), step(600, 0, 0.03, 1.3), step(100, 60, 0.015, 1.3)]
    found = overheads_of(steps, {1: steps[0].took, 2: 2 * steps[0].took}, 2)
    assert (found.statement, found.again, found.step) == pytest.approx((2 * STATEMENT, 2 * AGAIN, 2 * STEP))
    assert found.crowding == pytest.approx((1.3, 2.6))


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([(0.01, 100, 0.012), (0.012, 400, 0.02)], (1.0, 2e-5)),
        ([(0.012, 400, 0.02), (0.01, 100, 0.012)], (1.0, 2e-5)),
        ([(0.01, 100, 0.022), (0.02, 400, 0.048)], (2.0, 2e-5)),
        ([(0.01, 100, 0.013)], (1.0, 3e-5)),
        ([(0.01, 100, 0.008)], (0.8, 0.0)),
        ([(0.01, 100, 0.013), (0.01, 100, 0.012)], (1.0, 2e-5)),  # as many statements
        ([(0.01, 100, 0.013), (0.02, 200, 0.022)], (1.0, 1e-5)),  # as many for a second of operators
        ([(0.01, 100, 0.013), (0.01, 400, 0.012)], (1.25, 0.0)),  # nothing of them is the statements'
    ],
)
def test_part_and_statement(runs: list[tuple[float, int, float]], found: tuple[float, float]) -> None:
    assert part_and_statement(runs) == pytest.approx(found, abs=1e-9)
