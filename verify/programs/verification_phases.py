"""The phases of verifying a plan: prepare, reference, run, compare, localise, report.

prepare     prepare_verification  the model with random parameters, its trace, the program, matched random draws
prove       proof                 the text of the program, read and not run, and the lemmas that its proof relies on
reference   reference/            the eager model's trajectory
plan        rerun_with_other_scale_or_labels
                                  what is run beside the trajectory, each with a reference of its own
run         execution/            one run of all ranks, which does all of it
compare     checks/               the trajectory first; what comes beside it repeats its findings and only adds others
localise    localise/             where a value, or a gradient, first is another one
report      assemble_report
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.kernel_threads import kernel_threads
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint
from nnscaler.transform.plan import Plan
from verify.programs.assemble_report import keep_program, make_report
from verify.programs.checks import judge_steps_with_other_scale_or_labels, resume, run_checks, timed
from verify.programs.checks.input_and_outcome import LOCALISED, CheckOutcome, Comparison, outcome_of
from verify.programs.checks.losses import check_forward_only
from verify.programs.checks.resume import check_other_plan
from verify.programs.eager_reference import (
    ReferenceSettings,
    Trajectory,
    logical_state,
    measure_condition,
    not_finite,
    run_reference,
)
from verify.programs.eager_with_program_draws import UnmatchedDraws
from verify.programs.execution.record_rank_steps import Task
from verify.programs.execution.run_on_backend import Failure, run_program
from verify.programs.lemmas.compare_operators_imported_alone import check_operators_alone
from verify.programs.loaded_model_and_plan import PlanSubject, RunContext
from verify.programs.localise import localise_apart
from verify.programs.low_precision import NoiseRow, low_precision_outcomes
from verify.programs.minimise_plan import PlanTrial, minimise
from verify.programs.prepare_verification import Prepared, prepare
from verify.programs.proof import Proof, ProofOptions, combine, prove_program
from verify.programs.request import PlanRequest, check_values
from verify.programs.rerun_with_other_scale_or_labels import Beside, failed, make_comparison, make_task, plan_trials
from verify.programs.source_map import SourceMap
from verify.programs.training.compare_delayed_sgd import check_stream, is_stream
from verify.programs.training.run import check_training
from verify.programs.typing.program_files.check_manifest_and_stored_tensors import Stored, check_batch, check_state
from verify.programs.typing.program_files.compare_operator_files import check_operator_files
from verify.results.finding import Finding
from verify.results.report import Check, Report
from verify.results.typed_attachments import ComparedTensor
from verify.results.verdict import Verdict

# L3 of verify-plan: the program in a lower precision, against the noise of the model itself in it.


def low_precision(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path, dtypes: Sequence[str]
) -> list[CheckOutcome]:
    """Run the program in each dtype, and compare every loss, gradient, parameter and buffer."""

    def run(precision: str | None, loss_scale: float) -> Comparison | CheckOutcome:
        task = make_task(request, prepared, reference, work)
        task = replace(task, precision=precision, loss_scale=loss_scale)
        outcome = run_program(task, request.rank_count, request.runs_on, request.timeout, prepared.context.server)
        if isinstance(outcome, Failure):
            return failed(outcome, prepared, 0.0)
        return make_comparison(request, prepared, reference, outcome)

    outcomes, rows = low_precision_outcomes(request.seed, prepared, reference, dtypes, run, prepared.context.progress)
    first, *others = outcomes
    return [replace(first, rows=tuple(_row(row) for row in rows)), *others]


def _row(row: NoiseRow) -> ComparedTensor:
    return ComparedTensor(f"{row.kind} in {row.dtype}", row.step, row.name, row.error, row.allowed, row.verdict)


MINIMISE_SECONDS = 20.0  # of processor time


def run_phases(request: PlanRequest, subject: PlanSubject, context: RunContext) -> Report:
    """Run all phases; the request's ranks and backend are set. Raises NnscalerError for what could not be run at
    all."""
    started = time.perf_counter()
    check_values(request)
    with tempfile.TemporaryDirectory(prefix="nnscaler-verify-") as folder, kernel_threads():
        work = Path(folder)
        prepared = prepare(request, subject, work / "program", context)
        if prepared.found is not None:
            request = request.with_plan(prepared.found.to_json())  # searched once
        stored = _stored(request, prepared)
        if stored is not None and stored.unhashed:
            prepared = replace(prepared, notes=(*prepared.notes, _unchecked(len(stored.unhashed))))
        state, notes = _check_folder(prepared, stored, request)
        prepared = replace(prepared, notes=(*prepared.notes, *notes))
        proof = None if request.level == "run" else _prove(request, prepared)
        reference: Trajectory | None = None
        outcomes: Sequence[CheckOutcome] = ()
        if prepared.runs and request.level != "static":
            with kernel_threads(prepared.model):
                prepared, reference, outcomes = _run(request, prepared, work)
                if proof is not None and proof.only_undecided and reference is not None:
                    outcomes = [*outcomes, *_in_own_dtype(request, prepared, reference, outcomes, work)]
        outcomes = [*(outcomes if proof is None else combine(proof, outcomes)), *state]
        report = make_report(request, prepared, reference, outcomes, proof, time.perf_counter() - started)
        return report if report.verdict.passes else keep_program(report, prepared.program.path, request)


def _prove(request: PlanRequest, prepared: Prepared) -> Proof:
    return prove_program(
        prepared.program.sources(),
        prepared.graph,
        folder=str(prepared.program.path),
        manifest=prepared.program.manifest,
        options=ProofOptions(request.timeout, request.seed, prepared.context.cached),
        progress=prepared.context.progress,
    )


def _stored(request: PlanRequest, prepared: Prepared) -> Stored | None:
    """Return what lies in the program's folder to start from; None where the model has no data."""
    program = prepared.program
    state = program.state()
    if state is None:
        return None
    own = {**({} if prepared.traced is None else prepared.traced.state), **prepared.built}
    replaceable = prepared.model.state_dict().keys()
    return Stored(program.manifest.state, state, own, request.own_weights, replaceable)


def _unchecked(count: int) -> str:
    values = f"the values of {count} tensor{'s' * (count != 1)} in state.pt were not checked"
    return f"{values}: the program was compiled without them (on the meta device), and its manifest has no hashes"


def _check_folder(
    prepared: Prepared, stored: Stored | None, request: PlanRequest
) -> tuple[list[CheckOutcome], tuple[str, ...]]:
    """Check what the program's folder starts from: its tensors, its sample batch, and its operators; and what they are
    without the model's file, where their files are right. The notes say what was not compared."""
    program, graph, folder = prepared.program, prepared.graph, str(prepared.program.path)
    read = request.level != "run"  # the text as well
    operators = check_operator_files(program.manifest, program.sources(), graph, folder, read=read)
    alone, note = None, None
    if operators is not None and operators.check.verdict.passes:
        alone, note = check_operators_alone(program.manifest, graph, program.path, request.seed)
    outcomes = [
        None if stored is None else check_state(stored, graph, folder),
        check_batch(program.manifest.batch, program.batch(), graph, folder),
        operators,
        alone,
    ]
    return [outcome for outcome in outcomes if outcome is not None], () if note is None else (note,)


def _run(
    request: PlanRequest, prepared: Prepared, work: Path
) -> tuple[Prepared, Trajectory | None, Sequence[CheckOutcome]]:
    """Run the reference and the program on every rank, and collect the results of both."""
    broken = _not_loadable(prepared)
    if broken is not None:
        return prepared, None, [failed(broken, prepared, 0.0)]
    if is_stream(prepared.program):
        outcomes, reference = check_stream(request, prepared, work)
        return prepared, reference, [*_random_numbers(prepared), *outcomes]
    prepared, reference = _reference(request, prepared)
    not_finite = _not_finite(reference)
    if not_finite is not None:
        return prepared, reference, [CheckOutcome(Check("reference", Verdict.INCONCLUSIVE, 0), (not_finite,))]
    if not request.exact:
        outcomes = low_precision(request, prepared, reference, work, [request.dtype])
        if any(o.check.verdict is Verdict.REFUTED for o in outcomes):
            outcomes[:0] = _localised(request, prepared, make_task(request, prepared, reference, work))
        return prepared, reference, outcomes
    beside = _beside(request, prepared, reference)
    prepared = replace(prepared, notes=(*prepared.notes, *beside.notes))
    outcomes = run_and_compare(request, prepared, reference, work, beside)
    if request.train:
        trained, notes = check_training(request, prepared, work)
        prepared, outcomes = replace(prepared, notes=(*prepared.notes, *notes)), [*outcomes, *trained]
    if any(o.check.verdict is Verdict.REFUTED for o in outcomes):
        notes = _minimal(request, prepared, reference, work)
        prepared = replace(prepared, notes=(*prepared.notes, *notes))
    if request.depth == "deep" and all(o.check.verdict.passes for o in outcomes):
        outcomes += low_precision(request, prepared, reference, work, ["bfloat16"])
    return prepared, reference, outcomes


def _in_own_dtype(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, outcomes: Sequence[CheckOutcome], work: Path
) -> list[CheckOutcome]:
    """Run a program once more in the model's own dtype, where lines of it are not the model's and no number differs:
    casts that are missing or others show in no run in float64, and operands of two dtypes raise."""
    own = {t.dtype for t in prepared.graph.with_role("parameter")} & {"float32", "bfloat16", "float16"}
    if len(own) != 1 or not request.exact or is_stream(prepared.program):
        return []
    if request.depth == "deep" or not all(o.check.verdict.passes for o in outcomes if o.check.count or o.findings):
        return []
    return low_precision(request, prepared, reference, work, [*own])


def _not_loadable(prepared: Prepared) -> Failure | None:
    """Return the failure of the first role file that does not load: it was edited, and is no longer valid Python."""
    for file in prepared.program.role_files:
        path = prepared.program.path / file
        try:
            load_role(path)
        except ProgramError as error:  # it names the line
            return Failure("rank_raises", str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises, a rank would raise too
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path.resolve())]
            return Failure("rank_raises", f"{path}:{lines[-1] if lines else 1}: {type(error).__name__}: {error}")
    return None


def _reference(request: PlanRequest, prepared: Prepared) -> tuple[Prepared, Trajectory]:
    settings = ReferenceSettings(clip=True, draws=prepared.draws, seed=request.seed)
    try:
        reference = run_reference(prepared.model, prepared.sample, steps=request.steps, settings=settings)
    except UnmatchedDraws as error:
        prepared = replace(prepared, draws=None, unmatched=str(error))
        settings = replace(settings, draws=None)
        reference = run_reference(prepared.model, prepared.sample, steps=request.steps, settings=settings)
    prepared.context.progress("reference", reference.seconds, f"eager model, float64, {request.steps} steps of SGD")
    return prepared, reference


def _not_finite(reference: Trajectory) -> Finding | None:
    losses = ((f"the loss of step {i}", loss) for i, loss in enumerate(reference.losses))
    steps = enumerate(reference.gradients)
    gradients = ((f"the gradient of `{n}` at step {step}", g) for step, found in steps for n, g in found.items())
    updated = ((f"`{name}` after the last step", value) for name, value in reference.parameters.items())
    return not_finite((*losses, *gradients, *updated))


def _beside(request: PlanRequest, prepared: Prepared, reference: Trajectory) -> Beside:
    trials, notes = plan_trials(request, prepared, reference)
    more, trains = request.depth != "quick" and request.exact, bool(prepared.graph.loss)
    return Beside(trials, forward_only=more or not trains, checkpoint=more and trains, notes=notes)


def run_and_compare(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path, beside: Beside | None = None
) -> list[CheckOutcome]:
    """Run the program on all ranks and compare everything that comes out."""
    extra = beside or Beside()
    task = make_task(request, prepared, reference, work, extra)
    started = time.perf_counter()
    ranks, context = request.rank_count, prepared.context
    outcome = run_program(task, ranks, request.runs_on, request.timeout, context.server)
    seconds = time.perf_counter() - started
    if isinstance(outcome, Failure):
        context.progress("run", seconds, "did not end")
        return [*_random_numbers(prepared), failed(outcome, prepared, seconds)]
    context.progress("run", seconds, f"{ranks} ranks on {request.backend}, {request.steps} steps")
    comparison = make_comparison(request, prepared, reference, outcome)
    ran = CheckOutcome(Check("program ran on every rank", Verdict.TESTED_EXACT, ranks, 0, seconds))
    comparison, compared = _compare(request, prepared, comparison)
    others = _compare_beside(comparison, task, extra)
    if request.depth == "deep" and task.checkpoint is not None:
        others += [check_other_plan(request, prepared, comparison, task, work / "other")]
    if any(o.check.verdict is Verdict.REFUTED for o in compared):
        others = [replace(o, findings=()) for o in others]  # they say the same again
    outcomes = [*_random_numbers(prepared), ran, *compared, *others]
    if any(o.check.verdict is Verdict.REFUTED for o in outcomes):
        outcomes[:0] = _localised(request, prepared, task)
    return outcomes


def _compare(request: PlanRequest, prepared: Prepared, comparison: Comparison) -> tuple[Comparison, list[CheckOutcome]]:
    """Run the checks of the trajectory; return the comparison with the tolerance that decided, and the outcomes."""
    reference = comparison.reference
    buffers = {name: tensor for name, tensor in logical_state(prepared.model).items() if name in reference.buffers}
    outcomes = run_checks(comparison, buffers)
    if all(o.check.verdict.passes for o in outcomes):
        return comparison, outcomes
    # is the model so ill-conditioned that rounding explains it? asked only now, for it costs another reference run
    condition = measure_condition(prepared.model, prepared.sample, reference, request.steps)
    comparison = replace(comparison, tolerance=condition)
    return comparison, run_checks(comparison, buffers)


def _compare_beside(comparison: Comparison, task: Task, beside: Beside) -> list[CheckOutcome]:
    checks: list[Callable[[], CheckOutcome]] = [
        partial(judge_steps_with_other_scale_or_labels.check, comparison, trial) for trial in beside.trials
    ]
    if beside.forward_only and comparison.reference.losses:
        checks.append(lambda: check_forward_only(comparison))
    if task.checkpoint is not None:
        folder = task.checkpoint
        checks.append(lambda: resume.check(comparison, load_checkpoint(folder).state))
    return timed(checks)


def _random_numbers(prepared: Prepared) -> Sequence[CheckOutcome]:
    """Report that the random numbers of model and program could not be matched, which leaves something open."""
    if prepared.unmatched is None:
        return ()
    message = f"random numbers were switched off on both sides, and are not compared: {prepared.unmatched}"
    return (
        CheckOutcome(Check("random numbers", Verdict.INCONCLUSIVE, 0), (Finding("random_numbers_unmatched", message),)),
    )


def _localised(request: PlanRequest, prepared: Prepared, task: Task) -> list[CheckOutcome]:
    """Localise every line that is wrong by itself, in a run where nothing is dropped."""
    if not prepared.graph.loss:
        return []  # its judge follows gradients
    started = time.perf_counter()
    found = localise_apart(task.plain(), prepared.graph, prepared.program, SourceMap(prepared.graph), request.timeout)
    text = f"{len(found)} wrong line{'s' * (len(found) != 1)}" if found else "nothing more"
    prepared.context.progress("localise", time.perf_counter() - started, text)
    return [outcome_of(Check(LOCALISED, Verdict.REFUTED, len(found), len(found)), found)] if found else []


def _minimal(request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path) -> tuple[str, ...]:
    """Minimise a plan whose program is wrong, and return a note on the splits that remain: the fault is among them."""
    if request.program is not None or prepared.traced is None or request.depth == "quick" or not prepared.graph.loss:
        return ()
    started = time.perf_counter()
    trial = PlanTrial(prepared.traced, make_task(request, prepared, reference, work), reference)

    def fails(smaller: Plan) -> bool:
        try:
            return trial.fails(smaller)
        except NnscalerError:
            raise
        except Exception:  # noqa: BLE001 - the compiler that made a wrong program may fail on others; nothing is learnt
            return False

    found = minimise(prepared.program.known_plan(), prepared.graph, fails, seconds=MINIMISE_SECONDS)
    text = "it does not fail again" if found is None else f"{found.trials} plans tried"
    prepared.context.progress("minimise", time.perf_counter() - started, text)
    return () if found is None else (found.text,)
