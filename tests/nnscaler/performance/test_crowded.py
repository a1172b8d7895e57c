"""Event simulation on devices that share cores."""

from __future__ import annotations

import pytest

from nnscaler.performance.predict_step_time import simulate_crowded
from nnscaler.scheduling.dependencies import chain
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.timeline import PassCosts, simulate


@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 3), (4, 6)])
def test_on_devices_of_their_own_it_is_the_plain_simulation(stages: int, micro: int) -> None:
    order = get_schedule("1f1b")(stages, 1, micro)
    costs = PassCosts([1.0 + s for s in range(stages)], [2.5] * stages, [1.0] * stages)
    plain = simulate(order, chain(stages), costs)
    found = simulate_crowded(order, chain(stages), costs, [1] * stages, lambda _: 1.0)
    assert found.makespan == pytest.approx(plain.makespan) and found.peak_live == plain.peak_live
    assert [[s.instruction for s in row] for row in found.rows] == [[s.instruction for s in row] for row in plain.rows]


def test_a_device_alone_has_the_cores_for_itself() -> None:
    """Two stages of one rank on one core. One micro-batch: never both at once. Two: B1.0 and F0.1 overlap."""
    share = {1: 0.5, 2: 1.0}.__getitem__
    one = simulate_crowded(get_schedule("gpipe")(2, 1, 1), chain(2), PassCosts.alike(2, 2.0, 4.0), [1, 1], share)
    assert one.makespan == 6.0  # half of 12
    two = simulate_crowded(get_schedule("gpipe")(2, 1, 2), chain(2), PassCosts.alike(2, 2.0, 4.0), [1, 1], share)
    assert two.makespan == pytest.approx(12.0)  # a core is never idle: all 24 at half of the time


def test_ranks_of_a_device_count() -> None:
    asked: list[int] = []

    def share(ranks: int) -> float:
        asked.append(ranks)
        return 1.0

    simulate_crowded(get_schedule("1f1b")(2, 1, 2), chain(2), PassCosts.alike(2, 1.0, 1.0), [2, 3], share)
    assert set(asked) == {2, 3, 5}
