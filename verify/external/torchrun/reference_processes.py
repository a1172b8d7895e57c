"""Run what is no rank of the others in forked processes: the script on one rank, once for each data part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nnscaler.error_text import in_one_line
from verify.external.torchrun.feed_data_of_all_ranks import Way
from verify.external.torchrun.watched_script_record import Mismatch, Unmatched
from verify.processes.pool import Died, Done, Event, Note, Task, run_forked


class Failed(Exception):
    """A run on one rank that did not end well. `args[0]` says how, in one line."""


class NotMatched(Exception):
    """A run whose data cannot be matched with that of the ranks. `args[0]` says why."""

    def __init__(self, why: str, mismatch: Mismatch = "other") -> None:
        super().__init__(why)
        self.mismatch = mismatch


@dataclass(frozen=True)
class NoReference:
    """Why the script on one rank, fed in one way, is no reference. `mismatch`: None where the run failed."""

    way: Way
    text: str
    mismatch: Mismatch | None

    @staticmethod
    def of(way: Way, problem: NotMatched | Failed) -> NoReference:
        """Return why, of what the run raised."""
        if isinstance(problem, NotMatched):
            return NoReference(way, str(problem), problem.mismatch)
        return NoReference(way, f"it fails with {problem}", None)


@dataclass(frozen=True)
class _Ending:
    """How a process ended. `error`: one line; empty where it ended well. `mismatch`: its data could not be matched."""

    error: str = ""
    mismatch: Mismatch | None = None


def run_apart(function: Callable[[int], None], count: int, timeout: float, folder: Path) -> None:
    """Call `function(number)` in so many processes at the same time; what they print goes to `folder`.

    Raises Failed and NotMatched; the first failure ends all.
    """
    for event in run_forked([_task(function, number, folder) for number in range(count)], count, timeout):
        if not isinstance(event, Done):
            raise Failed(f"its process {_how(event)}")
        ending: _Ending = event.result
        if ending.mismatch is not None:
            raise NotMatched(ending.error, ending.mismatch)
        if ending.error:
            raise Failed(ending.error)


def _how(event: Event[_Ending]) -> str:
    if isinstance(event, Died):
        return f"was {event.how}" if event.how.startswith("killed") else event.how
    return f"was still running after {event.seconds:.0f} seconds"


def _task(function: Callable[[int], None], number: int, folder: Path) -> Task[_Ending]:
    def run(_: Note) -> _Ending:
        redirect(folder / f"output-{number}")
        try:
            function(number)
        except Unmatched as problem:
            return _Ending(str(problem), problem.mismatch)
        except BaseException as error:  # noqa: BLE001 - a script that fails is a result
            return _Ending(f"{in_one_line(error, 300)}")
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
        return _Ending()

    return run


def redirect(file: Path) -> None:
    """Send what this process prints to a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
