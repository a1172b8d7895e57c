"""Find the lines of a program that begin asynchronous calls and never wait for them.

A collective with `async_op=True` hands out a work, and its result is there when somebody has waited for that. Where all
ranks are threads, or a machine is fast, it may be there without: no value shows that nobody waits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.call_sites import is_ours, is_program
from verify.external.ranks.torch_private import Work

_ASKED = {  # the functions that programs call, and what is around them
    torch.distributed.distributed_c10d.__file__,
    torch.distributed.c10d_logger.__file__,
    torch.overrides.__file__,
}
_WITHOUT_RESULT = ("send", "barrier")


@dataclass(eq=False)
class BegunLine:
    """A line that begins calls of one kind. `waited`: somebody has waited for one of them, or asked for its end."""

    kind: str
    place: str
    waited: bool = False


class BegunWork(Work):  # type: ignore[misc]
    """A work that tells the line of its call that somebody waits; subclasses say so, in `wait` and where they are asked
    for the end. `results`: the tensors that it writes."""

    line: BegunLine | None = None

    def __init__(self, results: Iterable[Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def reached(self) -> None:
        """Note that somebody waits for the end, or asks for it."""
        if self.line is not None:
            self.line.waited = True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._results

    def source_rank(self) -> int:
        return int(self._source_rank())

    def get_future(self) -> Any:
        """Wait, and return a future that has its value: torch would run callbacks in whatever thread completes it."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class BegunLines:
    """The lines of one rank that begin calls in a group."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], BegunLine] = {}

    def note(self, call: CommunicationCall, work: object) -> None:
        """Let a work know its line. What torch begins by itself is left out: its C++ waits in its own ways."""
        if isinstance(work, BegunWork) and call.place is not None and call.kind not in _WITHOUT_RESULT and _in_python():
            key = call.kind, call.place
            work.line = self._lines.setdefault(key, BegunLine(*key))

    def forgotten(self) -> tuple[str, ...]:
        """Return the lines of which no call was waited for. The last call of others may be waited for after the run."""
        return tuple(f"{line.kind} at {Path(line.place).name}" for line in self._lines.values() if not line.waited)


def all_forgotten(groups: Iterable[BegunLines]) -> tuple[str, ...]:
    """Return what is forgotten in any of several groups."""
    return tuple(dict.fromkeys(text for lines in groups for text in lines.forgotten()))


def note_of_forgotten(forgotten: Iterable[str]) -> tuple[str, ...]:
    """Return what a report says of it."""
    lines = sorted(dict.fromkeys(forgotten))
    if not lines:
        return ()
    where = ", ".join(lines)
    text = f"nobody waits for {where}, begun with `async_op=True`: its result may be used before it is there"
    return (text,)


def _in_python() -> bool:
    """Return whether the program itself makes the call, by a function of torch.distributed or not, and no other part of
    torch, which may hand the work to its C++."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (is_ours(frame.f_code.co_filename) or frame.f_code.co_filename in _ASKED):
        frame = frame.f_back
    return is_program(frame.f_code.co_filename)
