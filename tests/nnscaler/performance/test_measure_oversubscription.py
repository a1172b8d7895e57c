"""Steps that several ranks run at once are timed as one step of all of them."""

from __future__ import annotations

import pytest

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs import measure_on_ranks


class Steps:
    """Steps that say what they took: 100 seconds more on each rank, and ten more from one step to the next."""

    def __init__(self, program: str, communicator: Communicator | None = None) -> None:
        self.rank, self.made = int(program), 0 if communicator is None else 50
        self.outside: list[float] = []

    def run(self) -> float:
        self.made += 1
        return 100.0 * self.rank + 10.0 * self.made

    def run_alone(self) -> float:
        self.outside.append(0.5)
        return self.run()


def test_the_slowest_rank_says_what_a_step_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_on_ranks, "_TimedSteps", Steps)
    monkeypatch.setattr(measure_on_ranks, "ROUNDS", 1)

    def work(communicator: Communicator) -> object:
        own = str(communicator.rank)
        return measure_on_ranks.time_crowded(communicator, [own], [1, 2, 3], [(own, 2)], 25.0)

    found = Simulator(3).run(work)
    # Alone: steps of 20 and 30 s, after one that does not count, and then one of 50; of two ranks, the second one's
    # of 120, and of three the last one's of 220. The program of two ranks has made 50 steps before: the second one of
    # its turn takes 620 on the second rank.
    assert found[0] == found[1] == found[2]
    assert found[0] == ([25.0], [0.5], [50.0, 120.0, 220.0], [620.0])
