"""Judge one mutant at each level of verification."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.manifest import MANIFEST
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference, family_scale
from verify.programs.checks import run_checks
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.eager_reference import ReferenceSettings, logical_state, run_reference
from verify.programs.execution.record_rank_steps import RankResult
from verify.programs.execution.run_on_backend import Failure, finding_of, run_simulator
from verify.programs.localise import localise_apart
from verify.programs.opened_program import open_program
from verify.programs.prepare_verification import Prepared
from verify.programs.rerun_with_other_scale_or_labels import make_comparison, make_task
from verify.programs.source_map import SourceMap
from verify.programs.training.compare_delayed_sgd import PLAIN, is_stream, make_stream
from verify.programs.training.eager import EagerRun
from verify.programs.training.run import Training, compare_runs, run_ranks
from verify.programs.typing import check_program
from verify.programs.typing.program_files.check_manifest_and_stored_tensors import Stored, check_state
from verify.results.report import Check
from verify.results.verdict import Verdict
from verify.self_test.programs.mutants.mutant import Mutant, StateEdit
from verify.self_test.programs.right_programs import TIMEOUT, Base

Fault = Callable[[], AbstractContextManager[None]]
STREAMED = 6  # batches of a stream


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one level.

    codes  of its findings, the most telling first
    said   message and cause of the first findings
    """

    refuted: bool
    codes: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Executed:
    """Level 2. `first_loss`, `losses`: whether comparing the loss of the first step, or of each step, would show it."""

    answer: Answer
    first_loss: bool
    losses: bool


def read_statically(sources: Mapping[str, str], graph: Graph) -> Answer:
    """Level 0: the text alone."""
    started = time.perf_counter()
    result = check_program(sources, graph)
    return answer_of(result.outcomes, time.perf_counter() - started)


def answer_of(outcomes: Sequence[CheckOutcome], seconds: float) -> Answer:
    """Summarise the outcomes of checks as one answer."""
    verdicts = [o.check.verdict for o in outcomes]
    refuted = [o for o in outcomes if o.check.verdict is Verdict.REFUTED]
    findings = [f for o in (refuted or outcomes) for f in o.findings]
    said = " | ".join(f"{f.message} ({f.cause})" if f.cause else f.message for f in findings[:3])
    undecided = not refuted and (not verdicts or any(not v.passes for v in verdicts))
    return Answer(bool(refuted), tuple(dict.fromkeys(f.code for f in findings)), said, seconds, undecided)


def read_folder(base: Base, mutant: Mutant) -> Answer:
    """Level 0 of a program's folder: the text, the manifest, and the tensors that the program starts from."""
    program, started = base.subject.program, time.perf_counter()
    outcomes = list(check_program(mutant.sources(program.sources), program.graph, "", program.manifest).outcomes)
    if mutant.state is not None:
        state = mutant.state.apply(program.state)
        stored = Stored(program.manifest.state, state, program.state)
        outcomes.append(check_state(stored, program.graph))
    return answer_of(outcomes, time.perf_counter() - started)


class Execution:
    """Runs programs of one model on the simulator, against one reference run of it: in processes that may die, or
    (`apart` false) in this one, where it is one that may."""

    def __init__(self, base: Base, folder: Path, apart: bool = True) -> None:
        self.base = base
        self.folder = folder
        self.apart = apart
        settings = ReferenceSettings(clip=True, draws=base.prepared.draws, seed=base.request.seed)
        self.reference = run_reference(
            base.prepared.model, base.prepared.sample, steps=base.request.steps, settings=settings
        )
        self.task = make_task(base.request, base.prepared, self.reference, folder)
        self.streamed: tuple[Training, EagerRun] | None = None
        if is_stream(base.prepared.program):
            training = make_stream(base.request, base.prepared, PLAIN, STREAMED)
            self.streamed = training, training.model.train(training.course)

    def write(self, sources: Mapping[str, str]) -> Path:
        """Return the program as files, in a folder of its own."""
        path = Path(tempfile.mkdtemp(dir=self.folder))
        for file, text in sources.items():
            (path / file).write_text(text, encoding="utf-8")
        (path / MANIFEST).write_text(self.base.subject.program.manifest.to_json(), encoding="utf-8")
        return path

    def judge(
        self,
        sources: Mapping[str, str],
        fault: Fault = nullcontext,
        localised: bool = False,
        state: StateEdit | None = None,
    ) -> Executed:
        """Level 2: runs the program and compares everything that comes out with the model.

        `fault`: a bug of the runtime, for the time of the run. `localised`: also look where it goes wrong first.
        `state`: what is changed in the tensors that the program starts from.
        """
        started = time.perf_counter()
        path = self.write(sources)
        try:
            with fault():
                if self.streamed is not None:
                    return self._stream(*self.streamed, sources, path)
                task = replace(self.task, program=str(path))
                if state is not None:
                    task = replace(task, state=str(path / "state.pt"))
                    torch.save(state.apply(torch.load(self.task.state, weights_only=True)), path / "state.pt")
                results = run_simulator(task, self.base.spec.ranks, TIMEOUT, apart=self.apart)
                if isinstance(results, Failure):
                    return self._failed(results, path, time.perf_counter() - started)
                outcomes = self._compare(path, results)
                if localised and any(o.check.verdict is Verdict.REFUTED for o in outcomes):
                    outcomes[:0] = self._localised(path)
        except (KeyError, ValueError, NnscalerError) as error:  # declarations that contradict each other
            undecided = Answer(False, (type(error).__name__,), str(error), time.perf_counter() - started, True)
            return Executed(undecided, False, False)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        answer = answer_of(outcomes, time.perf_counter() - started)
        wrong = [self._loss_differs(results, step) for step in range(self.base.request.steps)]
        return Executed(answer, wrong[0], any(wrong))

    def _stream(self, training: Training, eager: EagerRun, sources: Mapping[str, str], path: Path) -> Executed:
        """Run a stream, and compare it with delayed SGD."""
        started = time.perf_counter()
        training = replace(training, program=replace(training.program, sources=dict(sources)))
        prepared = self._opened(path)
        found = run_ranks(training, self.base.request, prepared, path, "simulator", self.apart)
        if isinstance(found, Failure):
            return self._failed(found, path, time.perf_counter() - started)
        outcomes = compare_runs(training, found, prepared, eager)
        wrong = [
            max(len(r.steps) <= i or difference(r.steps[i].losses[0], step.losses[0]).relative for r in found)
            > FLOAT64_BOUND
            for i, step in enumerate(eager.steps)
        ]
        return Executed(answer_of(outcomes, time.perf_counter() - started), wrong[0], any(wrong))

    def _failed(self, failure: Failure, path: Path, seconds: float) -> Executed:
        refuted = failure.verdict is Verdict.REFUTED
        finding = finding_of(failure, path, SourceMap(self.base.traced.graph))
        return Executed(Answer(refuted, (failure.kind,), finding.message, seconds, not refuted), refuted, refuted)

    def _opened(self, path: Path) -> Prepared:
        return replace(self.base.prepared, program=open_program(path))

    def _compare(self, path: Path, results: tuple[RankResult, ...]) -> list[CheckOutcome]:
        prepared = self._opened(path)
        comparison = make_comparison(self.base.request, prepared, self.reference, results)
        kept = {n: t for n, t in logical_state(prepared.model).items() if n in self.reference.buffers}
        return run_checks(comparison, kept)

    def _localised(self, path: Path) -> list[CheckOutcome]:
        graph = self.base.traced.graph
        task = replace(self.task, program=str(path)).plain()
        found = localise_apart(task, graph, open_program(path), SourceMap(graph), TIMEOUT)
        return [CheckOutcome(Check("", Verdict.REFUTED, 0), found)] if found else []

    def _loss_differs(self, results: tuple[RankResult, ...], step: int) -> bool:
        expected = self.reference.losses[step]
        scale = family_scale(self.reference.losses)
        known = [loss for r in results if (loss := r.losses[step]) is not None]
        return not known or any(difference(loss, expected, scale).relative > FLOAT64_BOUND for loss in known)
