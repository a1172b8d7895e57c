"""A clock that stands while what it watches waits for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nnscaler.runtime.jobs import load_adjusted_clock
from nnscaler.runtime.jobs.load_adjusted_clock import LEAST, SLOWEST, FairClock, join_within

SPIN, SLEEP = "while True: pass", "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@contextmanager
def running(*programs: str) -> Iterator[list[int]]:
    processes = [subprocess.Popen([sys.executable, "-c", text], start_new_session=True) for text in programs]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            os.killpg(process.pid, 9)
            process.wait()


def watched(process: int, seconds: float) -> tuple[float, float]:
    """Wait that long; return the seconds on the wall clock and on the fair one."""
    begin, clock = time.monotonic(), FairClock(process)
    while time.monotonic() - begin < seconds:
        time.sleep(LEAST)
        clock.seconds()
    time.sleep(LEAST)
    fair = clock.seconds()
    return time.monotonic() - begin, fair


def counted() -> bool:
    return Path("/proc/self/schedstat").is_file()


@pytest.mark.skipif(not counted(), reason="this system does not count how long threads wait")
@pytest.mark.parametrize("program", [SPIN, PARENT])
@pytest.mark.long
def test_it_stands_while_others_have_the_processors(program: str) -> None:
    others = [SPIN] * 3 * len(os.sched_getaffinity(0))
    with running(program, *others) as (first, *_):
        time.sleep(1.0)  # a parent has started its child
        wall, fair = watched(first, 2.0)
    assert wall / SLOWEST * 0.9 < fair < 0.7 * wall


def test_it_runs_while_nobody_wants_a_processor() -> None:
    """A process that hangs runs into its limit, on any machine."""
    with running(SLEEP) as (process,):
        time.sleep(1.0)
        wall, fair = watched(process, 1.0)
    assert 0.6 * wall < fair <= wall


def test_it_is_the_clock_on_the_wall_where_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_adjusted_clock, "_threads", lambda root: {})
    wall, fair = watched(os.getpid(), 0.5)
    assert wall - 2 * LEAST - 0.5 < fair <= wall


def test_it_never_stands_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand threads of its own that all want one processor."""
    waited = iter(range(0, 10**15, 10**12))
    monkeypatch.setattr(load_adjusted_clock, "_threads", lambda root: {1: (0, next(waited))})
    wall, fair = watched(os.getpid(), 0.5)
    assert fair >= 0.5 * wall / SLOWEST


def test_a_thread_is_waited_for_so_long() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    join_within(thread, 0.3)
    assert thread.is_alive()
    ended.set()
    join_within(thread, 600.0)
    assert not thread.is_alive()
