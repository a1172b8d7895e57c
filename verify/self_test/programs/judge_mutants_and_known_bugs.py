"""Judge the mutants and known bugs of `nnscaler self-test plans`: does verify-plan find what is wrong with a program?

Every mutant is judged by the text alone, then by execution, then, where nothing refutes it, by the third oracle. A
known bug is judged as a user's program is, and its findings have to name the mechanism.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from verify.child_processes import Died, run_apart
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.opened_program import open_program
from verify.programs.rerun_with_other_scale_or_labels import Beside
from verify.programs.verification_phases import run_and_compare
from verify.self_test.programs.bugs_of_real_systems import ROWS, PlantedBug
from verify.self_test.programs.decide_mutant_equivalence import RUNS, OracleAnswer, compare_programs
from verify.self_test.programs.judge_mutant import Answer, Executed, Execution, answer_of, read_folder, read_statically
from verify.self_test.programs.mutants.catalogue import mutants_of, provable_mutants
from verify.self_test.programs.mutants.mutant import Mutant
from verify.self_test.programs.right_programs import BASES, NAMES, SMALL, TIMEOUT, TINY, Spec, build, specs
from verify.self_test.run_rows import Progress, run_rows, run_rows_apart

LEVELS = ("L0", "L2")
PROVABLE = 4  # times as many mutants of each kind in the smallest programs, which have few kinds


@dataclass(frozen=True, slots=True)
class MutantSelection:
    """The mutants that are wanted.

    quick      one plan a model, and every third mutant instead of every second; of the small programs every third
    seed       chooses where mutants are planted
    levels     that are asked
    models     names of the models
    each       mutants of each kind in each program
    processes  1: in this process
    """

    quick: bool = False
    seed: int = 0
    levels: tuple[str, ...] = LEVELS
    models: tuple[str, ...] = NAMES
    each: int = 1
    processes: int = 2

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The programs. Building one raises NnscalerError for a model that there is not."""
        small = tuple(TINY[name] for name in SMALL if name in self.models)
        if self.quick and len(small) == len(SMALL):
            small = small[::3]
        return (*specs(tuple(n for n in self.models if n not in TINY), self.quick), *small)


@dataclass(frozen=True, slots=True)
class JudgedMutant:
    """A mutant, what each level says (None: not asked), and the third oracle of what neither refutes."""

    mutant: Mutant
    static: Answer | None
    executed: Executed | None
    third: OracleAnswer | None = None

    @property
    def by_text(self) -> bool:
        return self.static is not None and self.static.refuted

    @property
    def by_running(self) -> bool:
        return self.executed is not None and self.executed.answer.refuted

    @property
    def killed(self) -> bool:
        return self.by_text or self.by_running

    @property
    def equivalent(self) -> bool:
        """Nothing refutes it and it computes the same: there is nothing to find."""
        return not self.killed and self.third is not None and self.third.same

    @property
    def first(self) -> str:
        """The level that catches it first."""
        return "L0" if self.by_text else "L2" if self.by_running else ""


@dataclass(frozen=True, slots=True)
class Original:
    """A right program, which no level may refute. `broken`: what was said against it."""

    spec: Spec
    broken: str


@dataclass(frozen=True)
class Batch:
    """Everything about one program."""

    original: Original
    judged: tuple[JudgedMutant, ...]
    seconds: float


def judge_spec(spec: Spec, wanted: MutantSelection) -> Batch:
    """Make the program and its mutants, and judge every so many of them; of a small program all."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nnscaler-mutants-") as folder:
        base = build(spec, Path(folder))
        execution = Execution(base, Path(folder))
        original = Original(spec, complaint(execution, wanted.levels))
        if spec.small is not None:
            mutants = provable_mutants(base, wanted.seed, PROVABLE * wanted.each)
        else:
            every = 3 if wanted.quick else 2
            first = sum(map(ord, spec.model)) % every
            mutants = islice(mutants_of(base, wanted.seed, wanted.each), first, None, every)
        judged = tuple(_judge(execution, mutant, wanted.levels) for mutant in mutants)
    return Batch(original, judged, time.perf_counter() - started)


def complaint(execution: Execution, levels: Sequence[str] = LEVELS) -> str:
    """Return what the levels say against a right program; empty if nothing, as it should be."""
    program = execution.base.subject.program
    said: list[str] = []
    if "L0" in levels:
        answer = read_statically(program.sources, program.graph)
        said += [f"L0: {answer.said}"] if answer.refuted or answer.undecided else []
    if "L2" in levels:
        executed = execution.judge(program.sources).answer
        said += [f"L2: {executed.said}"] if executed.refuted or executed.undecided else []
    return "; ".join(said)


def _judge(execution: Execution, mutant: Mutant, levels: Sequence[str]) -> JudgedMutant:
    program = execution.base.subject.program
    sources = mutant.sources(program.sources)
    static = read_folder(execution.base, mutant) if "L0" in levels else None
    executed = execution.judge(sources, state=mutant.state) if "L2" in levels else None
    judged = JudgedMutant(mutant, static, executed)
    if judged.by_running or (judged.killed and executed is None):
        return judged
    told = run_apart(partial(compare_programs, execution, sources, mutant.state), len(RUNS) * 2 * TIMEOUT)
    if not isinstance(told, OracleAnswer):
        told = OracleAnswer(
            False, f"its process was ended: {told.how}" if isinstance(told, Died) else "it does not end"
        )
    return JudgedMutant(mutant, static, executed, told)


def judge_all(wanted: MutantSelection, progress: Progress) -> Iterator[Batch]:
    """Judge every program; yield them in the order in which they are done."""
    chosen = wanted.specs
    numbers = iter(range(1, len(chosen) + 1))

    def tell(spec: Spec, made: str = "") -> None:
        progress(f"{next(numbers)} of {len(chosen)}: {spec.model} {spec.name}{made}")

    if wanted.processes < 2:
        yield from (batch for _, batch in run_rows(chosen, lambda spec: judge_spec(spec, wanted), tell))
        return
    for spec, batch in run_rows_apart(chosen, lambda spec, _: judge_spec(spec, wanted), wanted.processes):
        tell(spec, f": {len(batch.judged)} mutants, {batch.seconds:.0f} s")
        yield batch


# -- known bugs --------------------------------------------------------------------------------------------------------


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
