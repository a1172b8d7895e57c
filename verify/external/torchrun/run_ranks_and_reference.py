"""Run the script on its ranks, and on one rank in one of the ways of a feed."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.atomic_writes import save_tensors
from nnscaler.exception_in_one_line import in_one_line
from verify.child_processes import Died, Done, Event, Note, Task, run_forked
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks
from verify.external.ranks.torch_private import FileStore, bare_gloo
from verify.external.ranks.unwaited_async_calls import note_of_forgotten
from verify.external.torchrun.feed_data_of_all_ranks import Material, RanksFeed, Way
from verify.external.torchrun.run_watched_script import run_script
from verify.external.torchrun.watched_script_record import Mismatch, ScriptRecord, Start, Unmatched

# What is no rank of the others, in forked processes: the script on one rank, once for each data part.


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


# The script, on its ranks and on one.


@dataclass(frozen=True)
class ScriptRunner:
    """How a script is run.

    words    of the command line
    ranks    how many it is verified on
    steps    of each optimizer that are watched
    timeout  seconds of one run
    folder   for what the processes leave
    double   every floating-point tensor is float64
    parts    the mean over the data parts, each by itself, is right
    louder   factor of every gradient
    """

    words: tuple[str, ...]
    ranks: int
    steps: int
    timeout: float
    folder: Path
    double: bool
    parts: bool = False
    louder: float = 1.0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        """Return the words of the command line as a text."""
        return " ".join(self.words)

    def on_ranks(
        self,
        vary: Sequence[int] | None = None,
        dropout: bool = False,
        kept: Sequence[float] | None = None,
        ignored: tuple[int, ...] = (),
    ) -> tuple[ScriptRecord, ...]:
        """Run the script on all ranks; if asked, with other data on ranks of other numbers, with dropout, or with the
        share of labels on each rank that is kept (`Start`).

        Raises RanksFailed.
        """
        folder = self._folder("ranks")

        def on_rank(rank: int) -> None:
            redirect(folder / f"output-{rank}")
            other = None if vary is None else vary[rank]
            start = Start(self.words, rank, self.ranks, None, self.steps, self.double, other, 0, dropout, self.louder)
            start = start if kept is None else replace(start, kept=kept[rank], ignored=ignored)
            try:
                run_script(start, _saver(folder, rank))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()

        ran = run_ranks(on_rank, self.ranks, "gloo", initialise=False, timeout=self.timeout)
        first, *others = _records(folder, self.ranks)
        return replace(first, notes=(*first.notes, *note_of_forgotten(ran.forgotten))), *others

    def stopped(self) -> tuple[int, ...]:
        """Return the ranks that were stopped after their steps in the last run on all ranks, which need not have ended
        well: others may wait for them."""
        folder = max(self.folder.glob("*-ranks"))
        kept = [rank for rank in range(self.ranks) if (folder / f"record-{rank}.pt").exists()]
        loaded = {rank: torch.load(folder / f"record-{rank}.pt", weights_only=False)[0] for rank in kept}
        return tuple(rank for rank, record in loaded.items() if record.stopped)

    def alone(self) -> None:
        """Run the script on one rank as it is. Raises Failed."""
        folder = self._folder("alone")

        def task(number: int) -> None:
            start = Start(self.words, 0, 1, folder / "store", self.steps, self.double, devices=self.ranks)
            run_script(start, _saver(folder, number))

        run_apart(task, 1, self.timeout, folder)

    def fed(self, material: Material, way: Way) -> tuple[ScriptRecord, ...]:
        """Run the script on one rank with the data of the ranks: once, or once for each data part at the same time.

        Raises Failed, and NotMatched where its data cannot be matched with theirs.
        """
        folder = self._folder(way)
        count = len(material.parts) if way == "part" else 1

        def task(part: int) -> None:
            notes: list[str] = []
            add_up = _adder(folder / "parts", part, count) if count > 1 else None
            feed = RanksFeed(material, way, notes.append, part, add_up)
            store = folder / f"store-{part}"
            louder = self.louder * (count if material.summed else 1)
            start = Start(self.words, 0, 1, store, self.steps, self.double, devices=self.ranks, louder=louder)
            start = replace(start, reordered=material.reordered)
            run_script(start, _saver(folder, part, notes), feed)

        run_apart(task, count, self.timeout, folder)
        made = _records(folder, count)
        if material.summed:
            made = tuple(_times(count, record) for record in made)
        if any(not record.steps for record in made):
            printed = _last_lines(sorted(folder.glob("output-*")), 1)
            raise NotMatched(
                "on one rank the script ends before its first optimizer step" + (f": {printed!r}" if printed else "")
            )
        return made

    def output(self) -> str:
        """Return the last lines that the ranks printed in the last run on all ranks."""
        return _last_lines(sorted(self.folder.glob("*-ranks/output-*"))[-self.ranks :], 8)

    def _folder(self, name: str) -> Path:
        folder = self.folder / f"{next(self._numbers):03}-{name}"
        folder.mkdir()
        return folder


def _last_lines(files: Sequence[Path], count: int) -> str:
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def _records(folder: Path, count: int) -> tuple[ScriptRecord, ...]:
    loaded = [torch.load(folder / f"record-{number}.pt", weights_only=False) for number in range(count)]
    return tuple(replace(record, notes=(*record.notes, *dict.fromkeys(notes))) for record, notes in loaded)


def _times(factor: int, record: ScriptRecord) -> ScriptRecord:
    """Return a record with the losses of louder gradients, which it has as they were."""
    steps = (replace(step, losses=tuple(factor * loss for loss in step.losses)) for step in record.steps)
    return replace(record, steps=tuple(steps))


def _saver(folder: Path, number: int, notes: list[str] | None = None) -> Callable[[ScriptRecord], None]:
    def save(record: ScriptRecord) -> None:
        save_tensors((record, tuple(notes or ())), folder / f"record-{number}.pt")

    return save


def _adder(store: Path, part: int, count: int) -> Callable[[Tensor], None]:
    """Return a function that adds up a tensor over processes that are no ranks of each other."""
    limit = datetime.timedelta(days=7)
    group = bare_gloo(FileStore(str(store), count), part, count, limit)

    def add_up(tensor: Tensor) -> None:
        group.allreduce([tensor]).wait()

    return add_up
