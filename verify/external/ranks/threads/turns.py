"""Let the threads of ranks run in turns, one at a time, and find out where none can go on.

One rank runs at a time, the one with the baton. It keeps it until it has to wait; then the next rank (round robin) that
has not started, or whose wait is over, gets it, with the state of the process as that rank left it. So the order in
which ranks run is a function of the program alone. Nothing waits by time: where every rank waits and no wait is over,
no rank can ever go on, and who looks last says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.globals_of_ranks import RankState, load_state, save_state
from verify.external.ranks.run_result import RanksFailed

Ready = Callable[[], bool]


class RankStopped(BaseException):
    """Ends a rank because another one has failed. No `Exception`: programs catch those and go on."""


@dataclass(eq=False)
class Turn:
    """One thread of a rank.

    rank     its rank; helper: it was started by the rank, and runs whenever it can
    wake     told when the thread may go on
    status   "new", "running", "waiting" or "finished"
    what     it waits for, or did last; ready: whether that wait is over
    state    of the process when this rank last ran
    """

    rank: int
    wake: threading.Condition
    helper: bool = False
    status: str = "new"
    what: CommunicationCall | str | None = None
    ready: Ready | None = None
    state: RankState | None = None

    @property
    def can_go_on(self) -> bool:
        """True where it has not started, or its wait is over."""
        return self.status == "new" or (self.status == "waiting" and self.ready is not None and self.ready())

    def text(self) -> str:
        """Say what the thread is doing."""
        if self.status == "waiting":
            return f"waits in {self.what}"
        last = f"; its last communication call was {self.what}" if self.what is not None else ""
        return {"new": "has not started", "finished": f"finished{last}"}.get(self.status, f"was running{last}")


class Turns:
    """The threads of all ranks. `lock` guards this, and all that waits are about: callers hold it."""

    def __init__(self, ranks: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.lock = threading.Lock()
        self.failure: RanksFailed | None = None
        self.mains = [Turn(rank, threading.Condition(self.lock)) for rank in range(ranks)]
        self.helpers: list[Turn] = []
        self.holder: Turn | None = None
        self.note = note  # told who runs, and after which call
        self.remarks: Callable[[], list[str]] = list  # on a deadlock
        self._here = threading.local()

    # -- threads begin and end ----------------------------------------------------------------------------------------

    def begin(self, rank: int) -> None:
        """Make the current thread the main one of a rank, and wait for its first turn. Raises RankStopped."""
        turn = self.mains[rank]
        self._here.turn = turn
        with self.lock:
            while self.holder is not turn and self.failure is None:
                turn.wake.wait()
            turn.status = "running"
            self._check(turn)
            self.note(f"rank {rank} {turn.text()}")

    def start(self, states: list[RankState]) -> None:
        """Give each rank the state that it begins with, and the baton to rank 0, before any thread begins."""
        for turn, state in zip(self.mains, states, strict=True):
            turn.state = state
        self.holder = self.mains[0]
        load_state(states[0])

    def new_helper(self, rank: int) -> Turn:
        """Return the turn of a thread that a rank is about to start."""
        turn = Turn(rank, threading.Condition(self.lock), helper=True, status="running")
        with self.lock:
            self.helpers.append(turn)
        return turn

    def begin_helper(self, turn: Turn) -> None:
        """Make the current thread that helper."""
        self._here.turn = turn

    def end(self, turn: Turn) -> None:
        """Note that a thread has ended, and let another go on."""
        with self.lock:
            turn.status = "finished"
            if turn.helper:
                self.helpers.remove(turn)
            self._go_on(turn)

    def here(self) -> Turn | None:
        """Return the current thread's turn; None for a thread that no rank started."""
        return getattr(self._here, "turn", None)

    # -- waiting, the lock held ---------------------------------------------------------------------------------------

    def wait(self, what: CommunicationCall | str, ready: Ready) -> None:
        """Wait until `ready()`, which some other thread makes true. Raises RankStopped when a rank has failed."""
        turn = self.turn()
        self._check(turn)
        turn.what = what
        if not ready():
            self._suspend(turn, ready)

    def let_others_run(self, what: CommunicationCall | str) -> None:
        """Let another rank run before this one, which asks again and again whether something has happened."""
        turn = self.turn()
        self._check(turn)
        turn.what = what
        if not turn.helper and any(t.can_go_on for t in self.mains if t is not turn):
            self._suspend(turn, lambda: True)

    def poke(self) -> None:
        """Let threads go on whose waits are over; call it after whatever they may wait for."""
        for turn in self.helpers:
            if turn.status == "waiting" and turn.can_go_on:
                turn.wake.notify()
        if self.holder is None:
            self._hand_on(self.mains[-1])

    def lend(self) -> None:
        """Take the baton from a rank that does nothing, for it waits for what is not known here, and hand it on."""
        with self.lock:
            if self.holder is not None and any(t.can_go_on for t in self.mains if t is not self.holder):
                self._hand_on(self.holder)

    def give_up(self) -> None:
        """Call it a deadlock when nothing happens: all ranks wait, and so do helpers, for what is not known here."""
        with self.lock:
            if self.failure is None and not any(t.status in ("running", "new") or t.can_go_on for t in self.mains):
                self.fail(self.deadlock())

    def turn(self) -> Turn:
        """Return the current thread's turn."""
        turn = self.here()
        assert turn is not None, "a thread that no rank started uses a rank's group"
        return turn

    def _suspend(self, turn: Turn, ready: Ready) -> None:
        turn.status, turn.ready = "waiting", ready
        self._go_on(turn)
        while (not ready() if turn.helper else self.holder is not turn) and self.failure is None:
            turn.wake.wait()
        turn.status, turn.ready = "running", None
        self._check(turn)
        self.note(f"rank {turn.rank} {turn.text()}")

    def _check(self, turn: Turn) -> None:
        if self.failure is not None:
            raise RankStopped(f"rank {turn.rank} stopped because another one failed")

    def _go_on(self, turn: Turn) -> None:
        """After `turn` has stopped to run: hand the baton on, and find out whether nobody can go on."""
        if turn is self.holder or self.holder is None:
            self._hand_on(turn)
        if self.failure is None and not self._anybody_runs():
            self.fail(self.deadlock())

    def _hand_on(self, turn: Turn) -> None:
        """Give the baton to the next rank after `turn`'s that can go on; to nobody where none can."""
        count = len(self.mains)
        order = [self.mains[(turn.rank + 1 + step) % count] for step in range(count)]
        following = next((other for other in order if other.can_go_on), None)
        if self.holder is not None and following is not self.holder:
            self.holder.state = save_state(self.holder.state)
        if following is not None and following is not self.holder:
            assert following.state is not None
            load_state(following.state)
        self.holder = following
        if following is not None:
            following.wake.notify()

    def _anybody_runs(self) -> bool:
        threads = [*self.mains, *self.helpers]
        if all(turn.status == "finished" for turn in self.mains):
            return True  # helpers that outlive their ranks are ended with the run
        return any(t.status == "running" or t.can_go_on for t in threads)

    # -- failing, the lock held ---------------------------------------------------------------------------------------

    def fail(self, failure: RanksFailed) -> None:
        """End the run: the first failure counts, and every thread stops at its next communication."""
        if self.failure is None:
            self.failure = failure
        for turn in [*self.mains, *self.helpers]:
            turn.wake.notify()

    def by_rank(self) -> dict[int, str]:
        """Say what each rank is doing."""
        return {turn.rank: turn.text() for turn in self.mains}

    def deadlock(self) -> RanksFailed:
        """Describe that no rank can go on: what each waits for, and what nobody has received."""
        waiting = [turn for turn in [*self.mains, *self.helpers] if turn.status == "waiting"]
        lines = [
            f"  rank {turn.rank}{' (a helper thread)' if turn.helper else ''} {turn.text()}"
            for turn in [*self.mains, *(h for h in self.helpers if h.status == "waiting")]
        ]
        message = "\n".join(["deadlock: no rank can go on", *lines, *self.remarks()])
        first = waiting[0] if waiting else None
        return RanksFailed(
            "deadlock",
            message,
            rank=first.rank if first is not None else None,
            place=place_of(first.what) if first is not None else None,
            by_rank=self.by_rank(),
        )


def place_of(what: CommunicationCall | str | None) -> str | None:
    """Return the line of a call, if it is known."""
    if isinstance(what, str):
        return what.rpartition(" at ")[2] if " at " in what else None
    return None if what is None else what.place
