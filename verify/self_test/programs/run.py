"""Judge every mutant: by the text alone, then by execution, then, for what nothing refutes, by the third oracle."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from nnscaler.runtime.jobs.rank_process import leave_stopping_to_parent
from verify.processes.pool import Died
from verify.processes.subprocess_isolation import run_apart
from verify.self_test.programs.corpus import TIMEOUT, Spec, build
from verify.self_test.programs.judge import Answer, Executed, Execution, read_folder, read_statically
from verify.self_test.programs.mutants.catalogue import mutants_of, provable_mutants
from verify.self_test.programs.mutants.mutant import Mutant
from verify.self_test.programs.third_oracle import RUNS, Told, compare_programs
from verify.self_test.programs.tiny_models import TINY

LEVELS = ("L0", "L2")
PROVABLE = 4  # times as many mutants of each kind in the smallest programs, which have few kinds


@dataclass(frozen=True, slots=True)
class JudgedMutant:
    """A mutant, what each level says (None: not asked), and the third oracle of what neither refutes."""

    mutant: Mutant
    static: Answer | None
    executed: Executed | None
    third: Told | None = None

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
    seconds: float


@dataclass(frozen=True)
class Batch:
    """Everything about one program."""

    original: Original
    judged: tuple[JudgedMutant, ...]
    seconds: float


def judge_spec(spec: Spec, seed: int, each: int, levels: Sequence[str] = LEVELS, every: int = 1) -> Batch:
    """Make the program and its mutants, and judge them, or (of a small program all) every so many of them."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nnscaler-mutants-") as folder:
        tiny = TINY.get(spec.model)
        base = build(spec, Path(folder)) if tiny is None else tiny.build(Path(folder), spec.model)
        execution = Execution(base, Path(folder))
        original = _original(execution, levels)
        chosen = islice(mutants_of(base, seed, each), sum(map(ord, spec.model)) % every, None, every)
        mutants = chosen if tiny is None else provable_mutants(base, seed, PROVABLE * each)
        judged = tuple(_judge(execution, mutant, levels) for mutant in mutants)
    return Batch(original, judged, time.perf_counter() - started)


def _original(execution: Execution, levels: Sequence[str]) -> Original:
    started = time.perf_counter()
    base, program = execution.base, execution.base.subject.program
    said: list[str] = []
    if "L0" in levels:
        answer = read_statically(program.sources, program.graph)
        said += [f"L0: {answer.said}"] if answer.refuted or answer.undecided else []
    if "L2" in levels:
        executed = execution.judge(program.sources).answer
        said += [f"L2: {executed.said}"] if executed.refuted or executed.undecided else []
    return Original(base.spec, "; ".join(said), time.perf_counter() - started)


def _judge(execution: Execution, mutant: Mutant, levels: Sequence[str]) -> JudgedMutant:
    program = execution.base.subject.program
    sources = mutant.sources(program.sources)
    static = read_folder(execution.base, mutant) if "L0" in levels else None
    executed = execution.judge(sources, state=mutant.state) if "L2" in levels else None
    judged = JudgedMutant(mutant, static, executed)
    if judged.by_running or (judged.killed and executed is None):
        return judged
    told = run_apart(partial(compare_programs, execution, sources, mutant.state), len(RUNS) * 2 * TIMEOUT)
    if not isinstance(told, Told):
        told = Told(False, f"its process was ended: {told.how}" if isinstance(told, Died) else "it does not end")
    return JudgedMutant(mutant, static, executed, told)


def judge_all(
    specs: Sequence[Spec],
    seed: int,
    each: int,
    levels: Sequence[str],
    progress: Callable[[str], None],
    processes: int = 2,
    every: int = 1,
) -> Iterator[Batch]:
    """Judge every program; yield them in the order in which they are done. `processes` 1: in this process."""
    if processes < 2:
        for number, spec in enumerate(specs, 1):
            progress(f"{number} of {len(specs)}: {spec.model} {spec.name}")
            yield judge_spec(spec, seed, each, levels, every)
        return
    with _workers(processes) as pool:
        waiting = {pool.submit(judge_spec, spec, seed, each, levels, every): spec for spec in specs}
        for number, done in enumerate(as_completed(waiting), 1):
            spec = waiting[done]
            batch = done.result()
            made = f"{len(batch.judged)} mutants, {batch.seconds:.0f} s"
            progress(f"{number} of {len(specs)}: {spec.model} {spec.name}: {made}")
            yield batch


@contextmanager
def _workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end at once when this one is stopped, and leave no temporary folder behind."""
    with tempfile.TemporaryDirectory(prefix="nnscaler-self-test-", ignore_cleanup_errors=True) as folder:
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _settle, (folder,))
        try:
            yield pool
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _settle(folder: str) -> None:
    leave_stopping_to_parent()
    tempfile.tempdir = folder
