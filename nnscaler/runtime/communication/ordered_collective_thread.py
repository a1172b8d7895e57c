"""A thread that makes a rank's collectives of one group, begun and waited for later, in the order in which they begin.

A lane is a thread, in which each begins when the one before it has ended. Groups have lanes of their own and do not
wait for each other: two ranks may begin collectives of different groups in any order.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from weakref import WeakSet


class LaneTask:
    """A function that a lane runs."""

    __slots__ = ("_done", "_error", "_function")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        del function
        self._done.set()

    def wait(self) -> None:
        """Return when the function has ended; raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Lane:
    """Runs functions one after another, in a thread that ends with the process."""

    busy = False  # in a function, which may wait for another rank in C++

    def __init__(self, name: str) -> None:
        _lanes.add(self)
        self._queue: SimpleQueue[LaneTask | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, function: Callable[[], None]) -> LaneTask:
        """Run the function after those before it."""
        work = LaneTask(function)
        self._queue.put(work)
        return work

    def close(self) -> None:
        """End the thread after what it was given."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self.busy = True
            work.run()
            self.busy = False
            del work  # and the tensors that it holds


_lanes: WeakSet[Lane] = WeakSet()


@atexit.register
def _end_with_error() -> None:
    """End a process that an exception ends as it is where a lane waits for another rank, in C++: one that comes back
    while Python is taken down would abort the process, which would look like the cause."""
    error = getattr(sys, "last_value", None)  # which Python has told by now
    if error is None or not any(lane.busy for lane in _lanes):
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
