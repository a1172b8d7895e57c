"""A clock for time limits that stands while processes wait for a processor.

A limit of wall-clock time ends right work when the machine is busy with something else, and a limit of processor time
never ends what sleeps. A `FairClock` runs like the clock on the wall, without the time in which the processes that it
watches wanted a processor and did not get one. Linux counts that time for every thread; elsewhere it is wall time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

LEAST = 0.2  # seconds between two looks at the processes
SLOWEST = 20.0  # a clock runs so many times slower than the wall's at most: what hangs is ended on any machine


class FairClock:
    """Counts from when it is made. `root`: a process; it is watched with all that it starts."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._looked = time.monotonic()
        self._counted = 0.0
        self._threads: dict[int, tuple[int, int]] = {}  # nanoseconds that each thread ran, and waited to run
        self._count()

    def seconds(self) -> float:
        """Return the time that has passed, as of the last look."""
        now = time.monotonic()
        passed = now - self._looked
        if passed >= LEAST:
            self._looked = now
            ran, waited = self._count()
            wanted = ran + waited
            busy = min(passed, wanted)  # for the rest of it they slept
            got = ran / wanted if wanted else 1.0
            self._counted += max(passed - busy + busy * got, passed / SLOWEST)
        return self._counted

    def _count(self) -> tuple[float, float]:
        """Return the seconds for which all threads ran, and waited to run, since this was called last."""
        ran = waited = 0
        now: dict[int, tuple[int, int]] = {}
        for thread, counted in _threads(self._root).items():
            before = self._threads.get(thread, (0, 0))
            now[thread] = counted
            ran += max(0, counted[0] - before[0])
            waited += max(0, counted[1] - before[1])
        self._threads = now
        return ran / 1e9, waited / 1e9


def join_within(thread: threading.Thread, seconds: float) -> None:
    """Wait for the end of a thread of this process, or for so many seconds of a FairClock."""
    clock = FairClock(os.getpid())
    while thread.is_alive() and clock.seconds() <= seconds:
        thread.join(min(LEAST, seconds))


def _threads(root: int) -> dict[int, tuple[int, int]]:
    """Return the two counts of each thread of a process and of what it has started; of none where nobody counts."""
    found: dict[int, tuple[int, int]] = {}
    processes = [root]
    while processes:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{processes.pop()}/task").iterdir():
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    ran, waited, _ = (thread / "schedstat").read_text().split()
                    found[int(thread.name)] = int(ran), int(waited)
                    processes += map(int, (thread / "children").read_text().split())
    return found
