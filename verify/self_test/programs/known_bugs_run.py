"""Judge the rows of Table T: what each level says, whether it names the mechanism, what a loss would have shown."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from verify.programs.checks.context import CheckOutcome
from verify.programs.program_directory import open_program
from verify.programs.rank_task import Beside
from verify.programs.run import run_and_compare
from verify.self_test.programs.corpus import BASES, build
from verify.self_test.programs.judge import Executed, Execution, answer_of, read_statically
from verify.self_test.programs.known_bugs import ROWS, PlantedBug
from verify.self_test.programs.run import JudgedMutant, complaint
from verify.self_test.runner import Progress, run_rows


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row, what the levels say of it, and the text of all their findings."""

    row: PlantedBug
    judged: JudgedMutant
    said: str

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Words that name the mechanism, and that no finding has."""
        return tuple(word for word in self.row.says if word not in self.said)

    @property
    def first_loss(self) -> bool:
        """Return whether comparing the first step's loss shows the bug."""
        return self.judged.executed is not None and self.judged.executed.first_loss

    @property
    def losses(self) -> bool:
        """Return whether comparing every step's loss shows it."""
        return self.judged.executed is not None and self.judged.executed.losses

    @property
    def good(self) -> bool:
        return self.judged.killed and not self.unsaid


@dataclass(frozen=True)
class TableT:
    """`broken`: what was said against programs that are right."""

    rows: tuple[RowResult, ...]
    broken: tuple[str, ...]
    seconds: float

    @property
    def missed_by_loss(self) -> int:
        """Rows whose first loss is right."""
        return sum(not r.first_loss for r in self.rows)

    @property
    def good(self) -> bool:
        """Every row refuted and named, no right program refuted, and the loss misses more than half."""
        enough = 2 * self.missed_by_loss > len(self.rows)
        return bool(self.rows) and all(r.good for r in self.rows) and not self.broken and enough


class TableBench:
    """The right programs, each built when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executions: dict[str, Execution] = {}

    def execution(self, name: str) -> Execution:
        """Return the right program in which a row is planted."""
        if name not in self.executions:
            folder = self.folder / str(len(self.executions))
            folder.mkdir()
            self.executions[name] = Execution(build(BASES[name], folder), folder)
        return self.executions[name]

    def problem(self, name: str) -> str:
        """Return the complaint about the right program; empty if there is none, as there should be."""
        said = complaint(self.execution(name))
        return f"{name}: {said}" if said else ""

    def judge(self, row: PlantedBug) -> RowResult:
        """Plant one row and verify it as a user's program is verified."""
        execution = self.execution(row.base)
        program = execution.base.subject.program
        mutant = row.mutant(execution.base)
        sources = mutant.sources(program.sources)
        static = read_statically(sources, program.graph)
        path = execution.write(sources)
        started = time.perf_counter()
        try:
            with (row.fault or nullcontext)():
                prepared = replace(execution.base.prepared, program=open_program(path))
                outcomes = run_and_compare(
                    execution.base.request, prepared, execution.reference, path, Beside(checkpoint=True)
                )
        finally:
            shutil.rmtree(path, ignore_errors=True)
        answer = answer_of(outcomes, time.perf_counter() - started)
        findings = [f for o in outcomes for f in o.findings]
        said = " ".join((static.said, *(f"{f.message} {f.cause or ''}" for f in findings)))
        steps = _wrong_losses(outcomes)
        return RowResult(row, JudgedMutant(mutant, static, Executed(answer, 0 in steps, bool(steps))), said)


def _wrong_losses(outcomes: Sequence[CheckOutcome]) -> set[int]:
    """Return the steps at which a comparison of losses alone fails; a program that does not run fails at the first."""
    found = {o.check.name: o for o in outcomes}
    if "loss" not in found:
        return {0}
    return {int(f.counter_example.get("step", "0")) for f in found["loss"].findings}


def run_table(progress: Progress, rows: Sequence[PlantedBug] = ROWS) -> TableT:
    """Run all rows, one after the other."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nnscaler-table-") as folder:
        bench = TableBench(Path(folder))
        judged = run_rows(rows, bench.judge, lambda row: progress(f"table T, row {row.number}: {row.bug}"))
        results = tuple(result for _, result in judged)
        broken = tuple(text for name in bench.executions if (text := bench.problem(name)))
    return TableT(results, broken, time.perf_counter() - started)
