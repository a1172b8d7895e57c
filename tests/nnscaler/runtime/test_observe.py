"""The observed copy of a role: what is reported, and that ranks which are threads may make theirs at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nnscaler.runtime.training.instrument_role_source import instrument

SOURCE = """
class Stage:
    def forward(self, x):
        a, b = x, {terms}
        return a, b

def free(y):
    z = y
    return z
"""


def test_assignments_of_methods_are_reported() -> None:
    seen: list[str] = []
    scope: dict[str, type] = {}
    exec(instrument(SOURCE.format(terms=2), "role.py"), scope)
    stage = scope["Stage"]()
    stage._observe = lambda name, value: seen.append(f"{name}={value}")
    assert stage.forward(1) == (1, 2)
    assert scope["free"](3) == 3
    assert seen == ["a=1", "b=2"]


class Cycle:
    """Garbage that only the collector finds, and whose end lets another thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.mark.long
def test_threads_may_instrument_at_once() -> None:
    """Before Python 3.13 the trees of all threads share one depth, and the collector may switch threads."""
    source = SOURCE.format(terms=" + ".join(f"f({'(' * 20}-x{')' * 20}[{n}])" for n in range(150)))

    def work(_: int) -> None:
        garbage = [Cycle() for _ in range(1000)]
        del garbage
        instrument(source, "role.py")

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(16)))) == 16
