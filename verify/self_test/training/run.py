"""`nnscaler self-test train`: does `verify-plan --train` find what is wrong with a training run, and say why?"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from verify.results.styled_line import StyledLine
from verify.results.verdict import Verdict
from verify.self_test.run_rows import Progress, closing_line, run_rows, run_rows_apart
from verify.self_test.training.bases import BASES, PRECISIONS, Bench, bench
from verify.self_test.training.mutants import ROWS, TrainingMutant

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
    groups: dict[tuple[str, str], list[TrainingMutant]] = {}
    for row in rows:
        groups.setdefault((row.base, row.optimizer), []).append(row)

    def work(group: tuple[str, str]) -> tuple[list[Said], str]:
        torch.set_num_threads(1)
        with right_run(*group) as right:
            said = complaint(right)
            return [judge(right, row) for row in groups[group]], f"{group}: {said}" if said else ""

    def tell(group: tuple[str, str]) -> None:
        progress(f"training, {' with '.join(group)}: {len(groups[group])} mutants")

    if processes < 2:
        found = list(run_rows(groups, work, tell))
    else:
        found = list(run_rows_apart(groups, lambda group, _: work(group), processes))
    judged = {
        id(row): JudgedTraining(row, *result)
        for group, (results, _) in found
        for row, result in zip(groups[group], results, strict=True)
    }
    broken = tuple(said for _, (_, said) in found if said)
    return TrainingTable(tuple(judged[id(row)] for row in rows), broken, time.perf_counter() - started)


def table_lines(table: TrainingTable, verbose: bool = False) -> list[StyledLine]:
    """Return the table: families, then every row that is not killed by a finding that names it."""
    families: Mapping[str, int] = Counter(row.mutant.family for row in table.rows)
    killed = Counter(row.mutant.family for row in table.rows if row.killed)
    lines = [_plain(f"{'family':<16} {'mutants':>8} {'killed':>8}")]
    lines += [_plain(f"{family:<16} {count:>8} {killed[family]:>8}") for family, count in families.items()]
    for row in table.rows:
        if verbose or not row.killed:
            word = "killed" if row.killed else "not named" if row.refuted else "ALIVE"
            lines.append(_plain(f"{word}: {row.mutant.base}: {row.mutant.bug}"))
            lines += [_plain(f"    {text}") for text in row.said[:2]]
    lines += [_plain(f"right, and refuted: {text}") for text in table.broken]
    rest = f"{table.killed} of {len(table.rows)} training mutants refuted by a finding that names them"
    return [*lines, closing_line(table.good, rest, table.seconds)]


def _plain(text: str) -> StyledLine:
    return StyledLine(((text, ""),))
