"""Run the rows of a table, in this process or in child processes that may die, and say at the end what came of it.

Every row ends in a result. What `work` raises is raised here, and a row whose process ends is judged again as `ended`
says, or raised: no row is left out.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from verify.child_processes import Died, Event, Note, Raised, TimedOut, can_run_apart, run_forked
from verify.results.styled_line import StyledLine, plain

Row = TypeVar("Row")
Result = TypeVar("Result")
Group = TypeVar("Group")
Progress = Callable[[str], None]


def run_rows(
    rows: Iterable[Row], work: Callable[[Row], Result], tell: Callable[[Row], object] = lambda row: None
) -> Iterator[tuple[Row, Result]]:
    """Yield each row with its result, one after the other in this process. `tell` is given each row first."""
    for row in rows:
        tell(row)
        yield row, work(row)


def died_unexpectedly(row: object, event: Died | TimedOut) -> RuntimeError:
    """Return the error about a row whose process ended where none should."""
    how = event.how if isinstance(event, Died) else "its time was up"
    return RuntimeError(f"the process of {row} ended outside of a run: {how}\n{event.trace}")


def ended_by_a_kernel(event: Died) -> bool:
    """Return whether the process was ended by what a kernel did, and not from outside: by a kill, or for its memory."""
    code = os.waitstatus_to_exitcode(event.status)
    return -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE)


def _raised(row: Row, event: Died | TimedOut) -> Row:
    raise died_unexpectedly(row, event)


def run_rows_apart(
    rows: Iterable[Row],
    work: Callable[[Row, Note], Result],
    processes: int,
    patience: float = math.inf,
    ended: Callable[[Row, Died | TimedOut], Row] = _raised,
) -> Iterator[tuple[Row, Result]]:
    """Yield each row with its result, in the order in which they are done in `processes` child processes.

    `work` is told where to note what it is at. `patience`: seconds for one row. `ended`: the row to judge instead of
    one whose process ended. Where no child can be started, the rows run in this process.
    """
    if not can_run_apart():
        yield from run_rows(rows, lambda row: work(row, lambda text: None))
        return
    waiting = list(rows)
    while waiting:
        again: list[Row] = []
        tasks = [partial(work, row) for row in waiting]
        events: Iterator[Event[Result]] = run_forked(tasks, processes, patience)
        for event in events:
            row = waiting[event.index]
            if isinstance(event, Raised):
                event.error.add_note(event.text)
                raise event.error
            if isinstance(event, Died | TimedOut):
                again.append(ended(row, event))
            else:
                yield row, event.result
        waiting = again


def run_groups(
    rows: Sequence[Row],
    group_of: Callable[[Row], Group],
    work: Callable[[Group, Sequence[Row]], tuple[Sequence[Result], str]],
    tell: Callable[[Group, int], object],
    processes: int,
) -> tuple[list[Result], tuple[str, ...]]:
    """Return the results of the rows, those of a group run together, and what was said against right programs.

    `work` returns the results of a group's rows, and what is said against their right program, empty if nothing. `tell`
    is given each group and the number of its rows first, where they run in this process.
    """
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    if processes < 2:
        found = list(run_rows(groups, lambda g: work(g, groups[g]), lambda g: tell(g, len(groups[g]))))
    else:
        found = list(run_rows_apart(groups, lambda g, _: work(g, groups[g]), processes))
    results = {id(row): one for group, (every, _) in found for row, one in zip(groups[group], every, strict=True)}
    return [results[id(row)] for row in rows], tuple(said for _, (_, said) in found if said)


def family_lines(rows: Sequence[tuple[str, bool]], width: int) -> list[StyledLine]:
    """Return how many mutants of each family there are, and are killed. `rows`: (family, killed) of each mutant."""
    mutants, killed = Counter(family for family, _ in rows), Counter(family for family, dead in rows if dead)
    lines = [f"{family:<{width}} {count:>8} {killed[family]:>8}" for family, count in mutants.items()]
    return [plain(f"{'family':<{width}} {'mutants':>8} {'killed':>8}"), *map(plain, lines)]


def closing_line(good: bool, rest: str, seconds: float) -> StyledLine:
    """Return the last line of every table: `PASSED  30 of 30 bugs refuted, 12.4 s`."""
    return StyledLine((("PASSED", "good") if good else ("FAILED", "bad"), (f"  {rest}, {seconds:.1f} s", "")))
