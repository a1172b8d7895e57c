"""`nnscaler self-test external`: does `verify-external` find what is wrong with programs of others, and say why?

The rows of one right program run together, after the program itself, which must be verified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verify.external.differential_run import ExternalSettings
from verify.external.program import ExternalProgram
from verify.external.verify import verify_program
from verify.results.report import Report
from verify.results.styled_line import StyledLine, plain
from verify.results.verdict import Verdict
from verify.self_test.external import (
    known_bugs,
    right_data_parallel_programs,
    right_pipeline_and_handwritten_programs,
    right_tensor_parallel_programs,
)
from verify.self_test.external.edits_that_make_mutants import ExternalMutant
from verify.self_test.external.mutants import (
    data_parallelism,
    fully_shard,
    hand_written_parallelism,
    mismatched_communication,
    pipeline_parallelism,
    tensor_parallel_plans,
)
from verify.self_test.run_rows import Progress, closing_line, family_lines, run_groups

_TABLES = (
    right_tensor_parallel_programs,
    right_data_parallel_programs,
    right_pipeline_and_handwritten_programs,
)
PROGRAMS: Mapping[str, ExternalProgram] = {name: p for table in _TABLES for name, p in table.PROGRAMS.items()}
assert len(PROGRAMS) == sum(len(table.PROGRAMS) for table in _TABLES), "two programs have one name"


ROWS: tuple[ExternalMutant, ...] = (
    *tensor_parallel_plans.ROWS,
    *fully_shard.ROWS,
    *data_parallelism.ROWS,
    *pipeline_parallelism.ROWS,
    *hand_written_parallelism.ROWS,
    *mismatched_communication.ROWS,
    *known_bugs.ROWS,
)
REQUIRED = 0.97  # of the mutants that are not equivalent
TIMEOUT = 120.0  # seconds of one run


@dataclass(frozen=True, slots=True)
class ExternalAnswer:
    """The answer of `verify-external` to one program.

    codes   of the findings, in order
    causes  their classes of cause; "" where a finding names none
    said    the first finding in words
    """

    verdict: Verdict
    codes: tuple[str, ...]
    causes: tuple[str, ...]
    said: str

    @staticmethod
    def of(report: Report) -> ExternalAnswer:
        """Read a report."""
        causes = tuple(finding.counter_example.get("cause", "") for finding in report.findings)
        said = report.findings[0].message.splitlines()[0] if report.findings else ""
        return ExternalAnswer(report.verdict, tuple(finding.code for finding in report.findings), causes, said)


@dataclass(frozen=True, slots=True)
class JudgedExternal:
    """A mutant and the answer to it."""

    mutant: ExternalMutant
    answer: ExternalAnswer

    @property
    def refuted(self) -> bool:
        return self.answer.verdict is Verdict.REFUTED

    @property
    def named(self) -> bool:
        """Return whether a finding names the class of the cause."""
        return bool(set(self.mutant.causes) & {*self.answer.codes, *self.answer.causes})

    @property
    def killed(self) -> bool:
        return self.refuted and self.named

    @property
    def word(self) -> str:
        """Return what came of it in one word."""
        if self.mutant.equivalent:
            return "equivalent" if self.answer.verdict.passes else "REFUTED, although right"
        return "killed" if self.killed else "not named" if self.refuted else "ALIVE"


@dataclass(frozen=True)
class ExternalTable:
    """`broken`: what was said against programs that are right."""

    rows: tuple[JudgedExternal, ...]
    broken: tuple[str, ...]
    programs: int
    seconds: float

    @property
    def wrong(self) -> tuple[JudgedExternal, ...]:
        """Return the rows whose programs are wrong."""
        return tuple(row for row in self.rows if not row.mutant.equivalent)

    @property
    def killed(self) -> int:
        return sum(row.killed for row in self.wrong)

    @property
    def good(self) -> bool:
        right = all(row.answer.verdict.passes for row in self.rows if row.mutant.equivalent)
        return bool(self.wrong) and right and not self.broken and self.killed >= REQUIRED * len(self.wrong)


def ask(name: str, edit: ExternalMutant | None = None, seed: int = 0, executor: str = "simulator") -> ExternalAnswer:
    """Verify a right program, or a mutant of it."""
    program = PROGRAMS[name] if edit is None else edit.edit(PROGRAMS[name])
    settings = ExternalSettings(executor=executor, seed=seed, timeout=TIMEOUT, isolate=False)
    return ExternalAnswer.of(verify_program(program, settings))


def run_table(progress: Progress, rows: Sequence[ExternalMutant] = ROWS, processes: int = 1) -> ExternalTable:
    """Run all rows, those of one right program together. Raises RuntimeError where a row ends its process."""
    started = time.perf_counter()

    def work(base: str, mutants: Sequence[ExternalMutant]) -> tuple[list[ExternalAnswer], str]:
        torch.set_num_threads(1)
        right = ask(base)
        said = "" if right.verdict.passes else f"{base}: {right.verdict.word}: {right.said}"
        return [ask(base, mutant) for mutant in mutants], said

    def tell(base: str, count: int) -> None:
        progress(f"external, {base}: {count} mutants")

    answers, broken = run_groups(rows, lambda row: row.base, work, tell, processes)
    judged = tuple(map(JudgedExternal, rows, answers))
    return ExternalTable(judged, broken, len({row.base for row in rows}), time.perf_counter() - started)


def table_lines(table: ExternalTable, verbose: bool = False) -> list[StyledLine]:
    """Return the table: families, then every row that is not killed by a finding that names its cause."""
    lines = family_lines([(row.mutant.family, row.killed) for row in table.wrong], 20)
    for row in table.rows:
        if verbose or row.word not in ("killed", "equivalent"):
            lines += _row_lines(row)
    lines += [plain(f"right, and not verified: {text}") for text in table.broken]
    equal = len(table.rows) - len(table.wrong)
    rest = f"{table.killed} of {len(table.wrong)} mutants of {table.programs} programs refuted with their cause"
    return [*lines, closing_line(table.good, f"{rest}, {equal} equivalent ones", table.seconds)]


def _row_lines(row: JudgedExternal) -> list[StyledLine]:
    mutant, answer = row.mutant, row.answer
    thread = f" ({mutant.thread})" if mutant.thread else ""
    first = (answer.codes[0], answer.causes[0] or "no cause") if answer.codes else ("no finding", "no cause")
    lines = [plain(f"{row.word}: {mutant.base}: {mutant.bug}{thread}")]
    lines.append(plain(f"    {answer.verdict.word}, {first[0]}, {first[1]}; expected {' or '.join(mutant.causes)}"))
    if mutant.equivalent:
        lines[-1] = plain(f"    {answer.verdict.word}: {mutant.equivalent}")
    return lines
