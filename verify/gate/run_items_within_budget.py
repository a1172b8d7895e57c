"""All items of a gate, each in a child process, within a budget of time.

A child that dies, hangs or raises is a finding of its item; the others go on. What did not fit into the budget is not
decided: never a pass.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from nnscaler.errors import NnscalerError
from verify.child_processes import (
    Died,
    Done,
    Note,
    Raised,
    Task,
    TimedOut,
    run_tasks,
    why_not_fork,
)
from verify.gate.items import ExternalItem, Item, OpItem, OpSource, PlanItem
from verify.gate.outcome import ItemResult
from verify.gate.run_order import Phase, State, Unit, batches, first_units, other_units
from verify.gate.verify_item import list_operators, without_repeats
from verify.results.finding import Finding
from verify.results.report import Check, Report, environment
from verify.results.verdict import Verdict

GRACE = 5.0  # seconds that an item has beyond its own limit, to tell of it itself
LEAST = 0.2  # seconds under which nothing is started
# what every child would import by itself, in seconds each time
_PRELOAD = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "verify.programs.verification_phases",
    "verify.operators.run.verify_many",
)
_PRELOAD_EXTERNAL = "verify.external.verify"  # and what only such an item would
T = TypeVar("T")
Perform = Callable[[Item, Phase, Note], ItemResult]
Runs = Generator[tuple[Unit, ItemResult], None, None]


@dataclass(frozen=True)
class Clock:
    """`budget`: seconds from `started` on; None: without end."""

    started: float
    budget: float | None

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.started)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started


def preload(external: bool = False) -> None:
    """Import once what each child needs. `external`: some of them verify programs of others."""
    if why_not_fork() is None:
        for name in (*_PRELOAD, *([_PRELOAD_EXTERNAL] if external else [])):
            importlib.import_module(name)


def find_operators(sources: Sequence[OpSource], folder: Path, clock: Clock) -> tuple[list[OpItem], list[ItemResult]]:
    """Return the operators of all sources, listed in child processes; and what became of sources that
    cannot be listed."""
    items: list[OpItem] = []
    failed: list[ItemResult] = []
    for source in sources:
        task: Task[tuple[OpItem, ...]] = _listing(source, folder)
        left = clock.left()
        if left < LEAST:
            failed.append(not_run(source.name, "verify-op", source.seed, "budget"))
            continue
        for event in run_tasks([task], 1, source.timeout, wall=left):
            if isinstance(event, Done):
                items += event.result
            else:
                failed.append(_lost(source.name, "verify-op", source.seed, event, cut=clock.left() <= 0))
    return without_repeats(items), failed


def _listing(source: OpSource, folder: Path) -> Task[tuple[OpItem, ...]]:
    def task(note: Note) -> tuple[OpItem, ...]:
        note(f"importing {source.name}")
        return list_operators(source, folder)

    return task


def run_items(items: Sequence[Item], state: State, clock: Clock, perform: Perform, jobs: int | None = None) -> Runs:
    """Run every item, worst first; yield each unit with its result as it comes.

    A unit that only reads a text is followed by the whole item, unless the text could not be had.
    """
    refuted: set[str] = set()
    done: set[str] = set()
    workers = jobs or os.cpu_count() or 1
    for round_ in (1, 2):
        units = first_units(items, state) if round_ == 1 else other_units(items, state, refuted, done)
        for batch in batches(units, workers):
            for unit, result in _run_batch(batch, clock, perform):
                if unit.phase == "all" or not result.finished:
                    done.add(unit.item.name)
                elif result.report.verdict is Verdict.REFUTED:
                    refuted.add(unit.item.name)
                yield unit, replace(result, finished=result.finished and unit.phase == "all")


def _run_batch(batch: Sequence[Unit], clock: Clock, perform: Perform) -> Runs:
    left = clock.left()
    if left < LEAST:
        return
    tasks = [_performing(unit, perform) for unit in batch]
    with closing(run_tasks(tasks, len(batch), batch[0].item.timeout + GRACE, wall=left)) as events:
        for event in events:
            unit = batch[event.index]
            if isinstance(event, Done):
                yield unit, replace(event.result, report=replace(event.result.report, seconds=event.seconds))
            elif isinstance(event, TimedOut) and clock.left() <= 0:
                continue  # the budget ended it: what is not there was not run
            else:
                yield unit, _lost(unit.item.name, tool_of(unit.item), unit.item.seed, event, cut=False)


def _performing(unit: Unit, perform: Perform) -> Task[ItemResult]:
    return lambda note: perform(unit.item, unit.phase, note)


def registered_later(results: Iterable[ItemResult], known: Iterable[Item]) -> list[OpItem]:
    """Return the operators that the models of plans register, and that are not among the known items.

    They are registered when a model is built or run: importing its file does not show them.
    """
    names = {item.name for item in known}
    return without_repeats(op for result in results for op in result.operators if op.name not in names)


def no_operator(source: OpSource) -> ItemResult:
    """Return the result of a source that asks for the operators of the models, where they have none."""
    error = NnscalerError("unknown_operator", "the models register no operator", help="take `user = true` out of ops")
    return _lost(source.name, "verify-op", source.seed, Raised(0, error, ""), cut=False)


def complete(items: Sequence[Item], results: dict[str, ItemResult], why: str) -> list[ItemResult]:
    """Return a result for each item.

    `why`: what kept the missing ones from running, "budget" or "interrupted". One whose text alone was read is not
    decided, unless that refutes it.
    """
    found: list[ItemResult] = []
    for item in items:
        result = results.get(item.name)
        if result is None:
            found.append(not_run(item.name, tool_of(item), item.seed, why))
        elif is_last(result):
            found.append(result)
        else:
            check = Check("execution", Verdict.INCONCLUSIVE, 0, detail=f"not run: {why}")
            finding = _not_run(item.name, why, "its program was read, and did not run")
            report = replace(
                result.report, checks=(*result.report.checks, check), findings=(*result.report.findings, finding)
            )
            found.append(replace(result, report=report))
    return found


def is_last(result: ItemResult) -> bool:
    """Return whether no other result of the item follows: more than its text was read, or it ended otherwise."""
    return result.finished or result.stop > 0 or not _only_text(result)


def _only_text(result: ItemResult) -> bool:
    return not any(f.code in ("item_died", "item_timed_out") for f in result.report.findings)


def tool_of(item: Item) -> str:
    """Return the command that verifies such an item."""
    if isinstance(item, ExternalItem):
        return "verify-external"
    return "verify-plan" if isinstance(item, PlanItem) else "verify-op"


def not_run(name: str, tool: str, seed: int, why: str) -> ItemResult:
    """Return the result of an item that did not run."""
    finding = _not_run(name, why, "nothing of it was checked")
    return ItemResult(name, _bare(name, tool, seed, finding), finished=False)


def _not_run(name: str, why: str, consequence: str) -> Finding:
    help = "--budget gives the gate longer, and --only runs this item alone" if why == "budget" else None
    return Finding("not_run", f"`{name}` was not run: {why}; {consequence}", help=help)


def _lost(name: str, tool: str, seed: int, event: Died | TimedOut | Raised | Done[object], cut: bool) -> ItemResult:
    """Make the result of an item whose process gave no report. `cut`: the gate's time budget ended it."""
    if isinstance(event, TimedOut) and cut:
        return not_run(name, tool, seed, "budget")
    seconds = event.seconds
    facts: dict[str, str] = {}
    help: str | None = None
    where, cause, stop = None, None, 0
    if isinstance(event, Raised) and isinstance(event.error, NnscalerError):
        error = event.error
        first, _, rest = error.message.partition("\n")
        code, message, where, stop = "could_not_run", f"`{name}` could not be run: {first}", error.where, 2
        facts, cause, help = {"error": error.code}, rest.strip() or None, error.help
    elif isinstance(event, Raised):
        last = (event.text.strip().splitlines() or [str(event.error)])[-1]
        code, message, stop = "internal_error", f"nnScaler failed on `{name}`: {last}", 101
        facts = {"traceback": event.text.strip()}
        help = "this is a bug of nnScaler, not a verdict: please report it with the traceback"
    elif isinstance(event, Died):
        code, message = "item_died", f"the process that ran `{name}` was ended: {event.how}"
        facts = {"running": event.note or "its first step", "ended": event.how}
        help = "killed by SIGKILL is mostly the system, out of memory" if "SIGKILL" in event.how else None
    else:
        assert isinstance(event, TimedOut)
        code, message = "item_timed_out", f"`{name}` was {event.how}"
        facts, help = {"running": event.note or "its first step"}, 'timeout = "600s" in the settings gives it longer'
    finding = Finding(code, message, where, facts, cause, help)
    report = replace(_bare(name, tool, seed, finding), seconds=seconds)
    return ItemResult(name, report, stop, finished=False)


def _bare(name: str, tool: str, seed: int, finding: Finding) -> Report:
    check = Check("ran to its end", Verdict.INCONCLUSIVE, 0, detail=finding.message)
    return Report(tool, name, "", seed, (check,), (finding,), (), environment())
