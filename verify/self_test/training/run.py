"""`nnscaler self-test train`: does `verify-plan --train` find what is wrong with a training run, and say why?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from verify.results.styled_line import StyledLine, plain
from verify.results.verdict import Verdict
from verify.self_test.run_rows import Progress, closing_line, family_lines, run_groups
from verify.self_test.training.mutants import ROWS, TrainingMutant
from verify.self_test.training.right_runs import BASES, PRECISIONS, Bench, bench

REQUIRED = 0.97  # of the mutants


@dataclass(frozen=True, slots=True)
class JudgedTraining:
    """A mutant, whether it is refuted, and the text of each finding."""

    mutant: TrainingMutant
    refuted: bool
    said: tuple[str, ...]

    @property
    def named(self) -> bool:
        """Return whether one finding has all words that name the mistake."""
        return any(all(word in text for word in self.mutant.says) for text in self.said)

    @property
    def killed(self) -> bool:
        return self.refuted and self.named


@dataclass(frozen=True)
class TrainingTable:
    """`broken`: what was said against runs that are right."""

    rows: tuple[JudgedTraining, ...]
    broken: tuple[str, ...]
    seconds: float

    @property
    def killed(self) -> int:
        return sum(row.killed for row in self.rows)

    @property
    def good(self) -> bool:
        return bool(self.rows) and not self.broken and self.killed >= REQUIRED * len(self.rows)


@contextmanager
def right_run(base: str, optimizer: str) -> Iterator[Bench]:
    """Build a right run, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="nnscaler-training-") as folder:
        yield bench(BASES[base], optimizer, Path(folder), PRECISIONS.get(base))


Said = tuple[bool, tuple[str, ...]]  # whether it is refuted, and the text of each finding


def judge(right: Bench, mutant: TrainingMutant) -> Said:
    """Plant a mutant and compare."""
    with mutant.fault():
        outcomes = right.outcomes(mutant.saved)
    refuted = any(o.check.verdict is Verdict.REFUTED for o in outcomes)
    said = tuple(f"{f.message} ({f.cause})" if f.cause else f.message for o in outcomes for f in o.findings)
    return refuted, said


def complaint(right: Bench) -> str:
    """Return what is said against a right run; empty if nothing, as it should be."""
    wrong = [o for o in right.outcomes() if not o.check.verdict.passes]
    return "; ".join(f"{o.check.name}: {o.findings[0].message if o.findings else o.check.verdict.word}" for o in wrong)


def run_table(progress: Progress, rows: Sequence[TrainingMutant] = ROWS, processes: int = 1) -> TrainingTable:
    """Run all rows, those of one right run together."""
    started = time.perf_counter()

    def work(group: tuple[str, str], mutants: Sequence[TrainingMutant]) -> tuple[list[Said], str]:
        torch.set_num_threads(1)
        with right_run(*group) as right:
            said = complaint(right)
            return [judge(right, mutant) for mutant in mutants], f"{group}: {said}" if said else ""

    def tell(group: tuple[str, str], count: int) -> None:
        progress(f"training, {' with '.join(group)}: {count} mutants")

    results, broken = run_groups(rows, lambda row: (row.base, row.optimizer), work, tell, processes)
    judged = tuple(JudgedTraining(row, *result) for row, result in zip(rows, results, strict=True))
    return TrainingTable(judged, broken, time.perf_counter() - started)


def table_lines(table: TrainingTable, verbose: bool = False) -> list[StyledLine]:
    """Return the table: families, then every row that is not killed by a finding that names it."""
    lines = family_lines([(row.mutant.family, row.killed) for row in table.rows], 16)
    for row in table.rows:
        if verbose or not row.killed:
            word = "killed" if row.killed else "not named" if row.refuted else "ALIVE"
            lines.append(plain(f"{word}: {row.mutant.base}: {row.mutant.bug}"))
            lines += [plain(f"    {text}") for text in row.said[:2]]
    lines += [plain(f"right, and refuted: {text}") for text in table.broken]
    rest = f"{table.killed} of {len(table.rows)} training mutants refuted by a finding that names them"
    return [*lines, closing_line(table.good, rest, table.seconds)]
