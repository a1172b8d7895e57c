"""Compare a program that updates its parameters after each batch with eager delayed SGD: losses, gradients, the states
of the optimizer and every version of every parameter.

Such a program does not equal the model, whatever it is compared with. `verify.programs.delayed_sgd_staleness` says what
it equals, and every report names it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nnscaler.errors import NnscalerError
from nnscaler.runtime.stage_base_class import Stage
from verify.programs.checks.input_and_outcome import CheckOutcome
from verify.programs.delayed_sgd_staleness import semantics, staleness_of
from verify.programs.eager_reference import ReferenceSettings, Trajectory
from verify.programs.execution.run_on_backend import Failure
from verify.programs.opened_program import OpenedProgram
from verify.programs.prepare_verification import Prepared
from verify.programs.request import PlanRequest
from verify.programs.rerun_with_other_scale_or_labels import failed
from verify.programs.training.eager import EagerRun, eager_model
from verify.programs.training.run import NAME, Training, batches_of, compare_runs, program_of, run_ranks, scales
from verify.programs.training.training_recipe import Course, carried_by, class_of, undecayed_of
from verify.programs.typing.program_files.parse_rank_program import read_role
from verify.programs.typing.program_files.rank_program_syntax import Unreadable
from verify.results.report import Check
from verify.results.verdict import Verdict

PLAIN = "torch.optim::SGD"
RAN = "stream: runs on every rank"


def is_stream(program: OpenedProgram) -> bool:
    """Return whether stages of a program declare a staleness, as the proof reads them, for they may not load. A text
    that cannot be read is proved in no case; it is one of a stream where it speaks of staleness."""
    for file in program.role_files:
        text = (program.path / file).read_text(encoding="utf-8")
        try:
            declared = any(stage.staleness is not None for stage in read_role(file, text).stages)
        except Unreadable:
            declared = "staleness" in text
        if declared:
            return True
    return False


def semantics_of(program: OpenedProgram) -> str:
    """Return what a stream is compared with, in words; empty for a program that makes steps."""
    return semantics(len(program.manifest.tensors)) if is_stream(program) else ""


def check_stream(request: PlanRequest, prepared: Prepared, work: Path) -> tuple[list[CheckOutcome], Trajectory]:
    """Run a stream on both sides and compare; return the outcomes, and the reference with plain SGD.

    With `--train` a second stream is compared, with the optimizer that is asked for. Raises NnscalerError for what is
    not compared of a stream.
    """
    if not request.exact:
        message = f"a stream is compared in float64, and not in {request.dtype}"
        raise NnscalerError("usage", message, help="leave --dtype out")
    training = make_stream(request, prepared, PLAIN, request.steps)
    outcomes, eager = _compared(training, request, prepared, work, "")
    if request.train:
        trained = make_stream(request, prepared, request.optimizer, request.train_steps)
        more, _ = _compared(trained, request, prepared, work, f", {request.optimizer}")
        outcomes += more
    return outcomes, trajectory_of(eager, training.course)


def make_stream(request: PlanRequest, prepared: Prepared, optimizer: str, batches: int) -> Training:
    """Make the course of a stream of at least so many batches, and more than there are on the way at a time."""
    class_of(optimizer)
    stages = prepared.program.stages()
    count = max(batches, len(stages) + 2)
    model = eager_model(prepared, request.seed, {})
    carried = carried_by(prepared.sample.tensors)
    drawn, notes = batches_of(replace(request, train_steps=count - 1), prepared, model, carried)
    rate, _ = scales(replace(request, optimizer="sgd" if optimizer == PLAIN else optimizer), prepared, model, drawn[0])
    parameters = {n: p for n, p in prepared.model.named_parameters() if p.requires_grad}
    course = Course(
        tuple((batch,) for batch in drawn),
        None,
        carried,
        optimizer,
        rate,
        None,
        frozenset(parameters) if optimizer == PLAIN else undecayed_of(parameters.items()),
        request.seed,
        draws=prepared.unmatched is None,
        compiled=request.compile,
        delays=delays_of(stages),
    )
    return Training(course, model, program_of(request, prepared), notes)


def delays_of(stages: Sequence[type[Stage]]) -> dict[str, int]:
    """Return by parameter how many updates a batch goes without: those of delayed SGD for the stage that has it,
    whatever the program declares."""
    return {
        description.fqn: staleness_of(stage.index, len(stages))
        for stage in stages
        for description in stage.parameters.values()
    }


def trajectory_of(eager: EagerRun, course: Course) -> Trajectory:
    """Return delayed SGD as a reference of a run."""
    steps = eager.steps
    losses = tuple(loss for step in steps for loss in step.losses)
    return Trajectory(
        losses,
        tuple(step.gradients for step in steps),
        steps[-1].parameters,
        eager.buffers,
        course.learning_rate,
        0.0,
        settings=ReferenceSettings(seed=course.seed),
    )


def _compared(
    training: Training, request: PlanRequest, prepared: Prepared, work: Path, suffix: str
) -> tuple[list[CheckOutcome], EagerRun]:
    started = time.perf_counter()
    eager = training.model.train(training.course)
    count = len(training.course.steps)
    prepared.context.progress(
        "reference", time.perf_counter() - started, f"eager delayed SGD, float64, {count} batches"
    )
    started = time.perf_counter()
    backend = request.runs_on if not suffix else request.train_backend or request.runs_on
    found = run_ranks(training, request, prepared, work, backend)
    seconds = time.perf_counter() - started
    if isinstance(found, Failure):
        return [_renamed(failed(found, prepared, seconds, NAME, "training: "), suffix)], eager
    prepared.context.progress("run", seconds, f"a stream of {count} batches on {request.rank_count} ranks, {backend}")
    ran = CheckOutcome(Check(RAN, Verdict.TESTED_EXACT, len(found), 0, seconds, f"{count} batches"))
    outcomes = [ran, *compare_runs(training, found, prepared, eager)]
    return [_renamed(outcome, suffix) for outcome in outcomes], eager


def _renamed(outcome: CheckOutcome, suffix: str) -> CheckOutcome:
    """Return a check of training as one of a stream."""
    name = outcome.check.name.replace("training:", "stream:").replace("each step", "each update")
    findings = tuple(replace(f, message=f.message.replace("training:", "stream:")) for f in outcome.findings)
    return replace(outcome, check=replace(outcome.check, name=f"{name}{suffix}"), findings=findings)
