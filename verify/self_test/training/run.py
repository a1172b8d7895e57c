"""`nnscaler self-test train`: does `verify-plan --train` find what is wrong with a training run, and say why?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import parallelize
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.eager_reference import logical_state
from verify.programs.execution.run_on_backend import Failure
from verify.programs.prepare_verification import Prepared
from verify.programs.request import PlanRequest
from verify.programs.rerun_with_other_scale_or_labels import failed
from verify.programs.training.eager import EagerRun
from verify.programs.training.resume import check_resumed
from verify.programs.training.run import (
    NAME,
    Training,
    compare_runs,
    compiled_sizes,
    make_training,
    own_dtypes,
    run_ranks,
)
from verify.results.styled_line import StyledLine, plain
from verify.results.verdict import Verdict
from verify.self_test.programs.right_programs import TIMEOUT, SmallModel, Spec, build
from verify.self_test.run_rows import Progress, closing_line, family_lines, run_groups
from verify.self_test.training.mutants import ROWS, TrainingMutant

# The right training runs that errors are planted in: a small model with everything that training can have.


WORDS, WIDTH, HIDDEN, SAMPLES = 11, 6, 7, 12


class TrainedLayer(nn.Module):
    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))
        return result


class Small(nn.Module):
    """Layers of uneven width between an embedding and a head that share a weight."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(TrainedLayer(dropout, norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def sample() -> Mapping[str, Tensor]:
    """Return one batch."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(WORDS, (SAMPLES,), generator=generator) for name in ("ids", "labels")}


_PLAIN = SmallModel(Small, sample)
_MODES = SmallModel(lambda: Small(0.25, True), sample)
_DROPPED = SmallModel(lambda: Small(0.25), sample)

BASES: Mapping[str, Spec] = {
    "dp": Spec("Small", "dp=2", 2, small=_PLAIN),
    "dp3": Spec("Small", "dp=3", 3, small=_PLAIN),
    "modes": Spec("Small", "dp=2", 2, small=_MODES),
    "dropped": Spec("Small", "dp=2", 2, small=_DROPPED),
    "zero1": Spec("Small", "dp=2,zero=1", 2, small=_PLAIN),
    "zero2": Spec("Small", "dp=3,zero=2", 3, small=_PLAIN),
    "zero2 micro": Spec("Small", "dp=2,zero=2", 2, 2, small=_PLAIN),
    "zero3": Spec("Small", "dp=2,zero=3", 2, small=_PLAIN),
    "tp": Spec("Small", "tp=2", 2, small=_PLAIN),
    "mesh": Spec("Small", "dp=2,tp=2", 4, small=_PLAIN),
    "staged": Spec("Small", "pp=2", 2, 2, small=_PLAIN),
    "masters": Spec("Small", "dp=2,zero=1", 2, small=_PLAIN),
    "staged dp": Spec("Small", "dp=2,pp=2", 4, 2, small=_PLAIN),
}
PRECISIONS: Mapping[str, str] = {"masters": "bfloat16"}


@dataclass(frozen=True)
class Bench:
    """A right program, its course, and the model's own run."""

    request: PlanRequest
    prepared: Prepared
    training: Training
    eager: EagerRun
    folder: Path

    def outcomes(self, saved: bool = True) -> list[CheckOutcome]:
        """Train on all ranks, in this process, and compare. `saved`: with a checkpoint in the middle."""
        course = self.training.course if saved else replace(self.training.course, saved_before=0)
        training = replace(self.training, course=course)
        found = run_ranks(training, self.request, self.prepared, self.folder, "simulator", apart=False)
        if isinstance(found, Failure):
            return [failed(found, self.prepared, 0.0, NAME, "training: ")]
        outcomes = compare_runs(self.training, found, self.prepared, self.eager)
        reread = check_resumed([(rank.rank, rank.resumed) for rank in found])
        outcomes += [] if reread is None else [reread]
        return outcomes + own_dtypes(self.training, self.request, self.prepared, self.folder, "simulator", apart=False)


def in_precision(prepared: Prepared, spec: Spec, precision: str) -> Program:
    """Return the program in mixed precision."""
    made = parallelize(
        prepared.model,
        dict(prepared.sample.tensors),
        ranks=spec.ranks,
        plan=spec.plan,
        micro_batches=spec.micro_batches,
        precision=precision,
    )
    return replace(made, state={**made.state, **logical_state(prepared.model)})


def bench(spec: Spec, optimizer: str, folder: Path, precision: str | None = None) -> Bench:
    """Compile the program, and all that its course needs. `precision`: mixed precision."""
    base = build(spec, folder)
    request = replace(base.request, train=True, optimizer=optimizer, timeout=TIMEOUT)
    training = make_training(request, base.prepared)
    if precision is not None:
        training = replace(training, program=in_precision(base.prepared, spec, precision))
    training = replace(training, sizes=compiled_sizes(training.program, training.course))
    return Bench(request, base.prepared, training, training.model.train(training.course), folder)


# The run.


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
