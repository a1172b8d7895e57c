"""A profile of a machine that something else keeps busy: figures stay possible ones, and it is said."""

from __future__ import annotations

import time

import pytest

from nnscaler.performance.measure_operators_and_collectives import _warn_if_busy
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.jobs import measure_on_ranks


def test_a_collective_takes_no_less_than_its_shortest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing alone seems to take longer than computing with a call in it."""
    monkeypatch.setattr(measure_on_ranks, "_nothing", lambda: time.sleep(0.05))
    calls = [("all_reduce", 2, 1 << 16, 2), ("send", 2, 1 << 12, 2)]

    def work(communicator: Communicator) -> list[float]:
        return measure_on_ranks.time_collectives(communicator, calls, 0.0)[0]

    found = Simulator(2).run(work)
    assert found[0] == found[1] and all(seconds > 2 * measure_on_ranks.LEAST for seconds in found[0])


class Heard:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def progress(self, text: str) -> None:
        raise AssertionError("it is no progress")

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize(
    ("computed", "took", "said"), [(4.0, 10.0, "for 60% of the time"), (9.8, 10.0, ""), (0.01, 0.1, "")]
)
def test_a_busy_machine_is_said(computed: float, took: float, said: str) -> None:
    heard = Heard()
    _warn_if_busy(computed, took, heard)
    assert len(heard.warnings) == bool(said) and said in "".join(heard.warnings)
