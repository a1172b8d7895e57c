"""Run the training of `verify-plan --train` on both sides, and compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from op_registry.call import dtype_name

from nnscaler.codegen.compiled_program import Origin, Program
from nnscaler.compile import for_batch
from nnscaler.errors import NnscalerError
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.float64_run import convert_floats
from nnscaler.tracing.sample_inputs import flatten_inputs
from nnscaler.training.program_on_rank import check_alike, stages_of_roles
from nnscaler.training.programs_by_batch_size import SentProgram, SizeClass, sent
from verify.programs.checks.input_and_outcome import CheckOutcome, Tally
from verify.programs.eager_reference import choose_learning_rate, clip_limit, logical_state, not_finite, scale_of
from verify.programs.execution.run_on_backend import Failure, devices_of, run_job, simulate
from verify.programs.prepare_verification import Prepared, matched_draws
from verify.programs.request import PlanRequest
from verify.programs.rerun_with_other_scale_or_labels import failed, state_at_start
from verify.programs.source_map import SourceMap
from verify.programs.static_check_of_recompiled_program import vouch
from verify.programs.training.comparison import compare
from verify.programs.training.eager import Draws, EagerModel, EagerRun, eager_model
from verify.programs.training.rank_loop import RankTraining, TrainTask, train_rank
from verify.programs.training.resume import check_resumed
from verify.programs.training.training_recipe import (
    Batch,
    Course,
    carried_by,
    class_of,
    drawn,
    in_steps,
    reordered,
    shortened,
    undecayed_of,
)
from verify.programs.training.training_run_pair import Trained
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "training: runs on every rank"
UPDATE_SHARE = 0.02  # of a parameter's size, that a step of Adam moves it by
REFUSED = ("update_needs_whole", "optimizer_refused", "no_update")  # what an optimizer cannot be given


@dataclass(frozen=True)
class Training:
    """The two sides of a comparison: the course, the model that goes through it, and the program.

    notes  what was left out
    sizes  programs that were compiled before; the engine compiles others when a batch comes
    """

    course: Course
    model: EagerModel
    program: Program
    notes: tuple[str, ...] = ()
    sizes: Mapping[SizeClass, SentProgram] = field(default_factory=dict)


def check_training(request: PlanRequest, prepared: Prepared, work: Path) -> tuple[list[CheckOutcome], tuple[str, ...]]:
    """Train on both sides and compare; return the outcomes, and notes on what was left out.

    Raises NnscalerError for an optimizer that there is not.
    """
    started = time.perf_counter()
    training = make_training(request, prepared)
    course = training.course
    backend = request.train_backend or "simulator"
    outcome = run_ranks(training, request, prepared, work, backend)
    seconds = time.perf_counter() - started
    if isinstance(outcome, Failure):
        return [failed(outcome, prepared, seconds, NAME, "training: ")], training.notes
    told = outcome[0].compilations
    detail = f"compiled for {len(told)} other size{'s' * (len(told) != 1)}" if told else ""
    ran = CheckOutcome(Check(NAME, Verdict.TESTED_EXACT, len(outcome), 0, seconds, detail))
    saved = check_resumed([(found.rank, found.resumed) for found in outcome])
    outcomes = [*compare_runs(training, outcome, prepared), *([] if saved is None else [saved])]
    outcomes += own_dtypes(training, request, prepared, work, backend)
    why = next((found.resumed.why for found in outcome if found.resumed.why), "")
    notes = (*training.notes, *((f"no checkpoint was made on the way: {why}",) if why else ()))
    prepared.context.progress(
        "train", time.perf_counter() - started, f"{len(course.steps)} steps of {course.optimizer}, on the {backend}"
    )
    return [ran, *outcomes], notes


def own_dtypes(
    training: Training, request: PlanRequest, prepared: Prepared, work: Path, backend: str, apart: bool = True
) -> list[CheckOutcome]:
    """Make one step in the program's own dtypes, where they are mixed, and check what the optimizer sees."""
    program, course = training.program, training.course
    if not is_mixed(program.plan.precision, logical_state(prepared.model)):
        return []
    once = replace(course, steps=course.steps[:1], evaluation=None, precision=None, saved_before=0)
    found = run_ranks(replace(training, course=once), request, prepared, work, backend, apart)
    if isinstance(found, Failure):
        return [failed(found, prepared, 0.0, NAME, "training: ")]
    return [check_dtypes(found, program.state)]


def compare_runs(
    training: Training, ranks: Sequence[RankTraining], prepared: Prepared, eager: EagerRun | None = None
) -> list[CheckOutcome]:
    """Compare what the ranks did with what the model does. `eager`: that, where it is known."""
    model, course = training.model, training.course
    micro_batches = prepared.program.manifest.micro_batches
    eager = eager or model.train(course)
    unusable = not_finite(_values_of(eager))
    if unusable is not None:
        return [CheckOutcome(Check("training: reference", Verdict.INCONCLUSIVE, 0), (unusable,))]
    trained = Trained(course, eager, model, tuple(ranks), micro_batches)
    places = SourceMap(prepared.graph).of_parameters()
    return compare(trained, lambda: model.train(course, moved=True), places.get)


def _values_of(eager: EagerRun) -> Iterator[tuple[str, Tensor | None]]:
    """Yield every value of the model's own training, with its name."""
    for number, step in enumerate(eager.steps):
        yield from ((f"a loss of step {number}", loss) for loss in step.losses)
        yield from ((f"the gradient of `{name}` at step {number}", value) for name, value in step.gradients.items())
        yield from ((f"`{name}` after step {number}", value) for name, value in step.parameters.items())


# -- the course -------------------------------------------------------------------------------------------------------


def make_training(request: PlanRequest, prepared: Prepared) -> Training:
    """Make the course of training: batches, optimizer, rate and norm."""
    class_of(request.optimizer)
    sample = prepared.sample.tensors
    carried = carried_by(sample)
    program = program_of(request, prepared)
    model = eager_model(prepared, request.seed, {})
    batches, notes = batches_of(request, prepared, model, carried)
    otherwise = _laid_out_otherwise(program, prepared)
    short, more, told = (
        _short(program, prepared, model, batches[-1], carried) if not otherwise else (None, {}, otherwise)
    )
    model = eager_model(prepared, request.seed, more)
    steps = in_steps(batches, request.train_steps)
    evaluation = None
    if not otherwise and not model.draws_in_evaluation():
        evaluation = short or batches[0]
    if short is not None and len(steps) > 1:
        steps = (*steps[:-1], (short,))
    parameters = {n: p for n, p in prepared.model.named_parameters() if p.requires_grad}
    rate, norm = scales(request, prepared, model, steps[0][0])
    course = Course(
        steps,
        evaluation,
        carried,
        request.optimizer,
        rate,
        norm,
        undecayed_of(parameters.items()),
        request.seed,
        draws=prepared.unmatched is None,
        compiled=request.compile,
        saved_before=len(steps) // 2,
    )
    return Training(course, model, program, (*notes, *told))


def program_of(request: PlanRequest, prepared: Prepared) -> Program:
    """Return the program of a folder as the engine takes it: with the model, and its random parameters."""
    opened = prepared.program
    sources = {file: (opened.path / file).read_text(encoding="utf-8") for file in opened.role_files}
    sample = prepared.sample
    origin = Origin(prepared.model, sample.rebuild, None, request.specialise)
    return Program(
        sources,
        opened.manifest,
        opened.known_plan(),
        prepared.graph,
        state_at_start(prepared),
        dict(sample.tensors),
        origin,
    )


def batches_of(
    request: PlanRequest, prepared: Prepared, model: EagerModel, carried: frozenset[str]
) -> tuple[list[Batch], tuple[str, ...]]:
    """Return one batch more than there are steps, which the model takes."""
    count = request.train_steps + 1
    sample = prepared.sample.tensors
    if prepared.train_batches:
        own = [dict(flatten_inputs(prepared.model, batch).tensors) for batch in prepared.train_batches]
        wrong = next(
            (b for b in own if {n: t.shape for n, t in b.items()} != {n: t.shape for n, t in sample.items()}), None
        )
        if wrong is not None:
            message = "train_batches() gives a batch of other shapes than sample_inputs()"
            raise NnscalerError(
                "inputs_differ", message, help="give batches of one size: a short one is made of the last"
            )
        return [own[i % len(own)] for i in range(count)], ()
    batches: list[Batch] = [drawn(sample, carried, request.seed + 1 + i) for i in range(count)]
    if all(model.runs_on(batch) for batch in batches):
        return batches, ()
    note = "the batches of the training are rows of the sample batch, drawn anew: the model takes no others"
    return [reordered(sample, carried, request.seed + 1 + i) for i in range(count)], (note,)


def _laid_out_otherwise(program: Program, prepared: Prepared) -> tuple[str, ...]:
    """Return a note where an edited text lays parameters out in another way than the plan does, by which programs for
    other sizes and for evaluation are compiled: they could not go on with its tensors, and none of them is wrong."""
    if not prepared.program.changes:
        return ()
    try:
        planned = stages_of_roles(sent(for_batch(program, program.inputs, training=True)), None)
        edited = stages_of_roles(sent(program), None)
        check_alike(edited, planned)
        before, after = ({stage.index: stage.ranks for stage in stages} for stages in (planned, edited))
        why = "" if before == after else f"its stages are on the ranks {after}, and by the plan on {before}"
    except NnscalerError as error:
        why = error.message
    left_out = "no batch of another size was trained on, and none evaluated: programs for them are compiled by the plan"
    return (f"{left_out}, and the text was edited: {why}",) if why else ()


def _short(
    program: Program, prepared: Prepared, model: EagerModel, batch: Batch, carried: frozenset[str]
) -> tuple[Batch | None, Mapping[int, Draws], tuple[str, ...]]:
    """Return a batch of another size, the random operations of the model on it, and a note where there is none."""
    short = shortened(batch, carried)
    if short is None:
        return None, {}, ()
    rows = short[min(carried)].shape[0]
    if not model.runs_on(short):
        return None, {}, (f"no batch of another size was trained on: the model does not take {rows} rows",)
    if prepared.draws is None:
        return short, {}, ()
    try:
        graph = for_batch(program, short, training=True).graph
    except NnscalerError as error:
        return None, {}, (f"no batch of another size was trained on: {error.message}",)
    draws, unmatched = matched_draws(prepared.model, replace(prepared.sample, tensors=short), graph)
    if unmatched is not None:
        return None, {}, (f"no batch of another size was trained on: {unmatched}",)
    return short, {rows: draws or ()}, ()


def scales(request: PlanRequest, prepared: Prepared, model: EagerModel, batch: Batch) -> tuple[float, float | None]:
    """Return a learning rate that moves the parameters by a small share, and a norm to which gradients are clipped."""
    wide = copied(prepared.model)
    convert_floats(wide, torch.float64)
    _, gradients = model.compute({}, batch)
    for name, parameter in wide.named_parameters():
        parameter.grad = gradients.get(name)
    norm = clip_limit(gradients.values())
    if request.optimizer == "sgd":
        return choose_learning_rate(wide), norm
    sizes = [scale_of(p.detach()) for p in wide.parameters() if p.requires_grad]
    return float(f"{UPDATE_SHARE * sum(sizes) / max(len(sizes), 1):.1e}"), norm


# -- the ranks --------------------------------------------------------------------------------------------------------


def run_ranks(
    training: Training, request: PlanRequest, prepared: Prepared, work: Path, backend: str, apart: bool = True
) -> tuple[RankTraining, ...] | Failure:
    """Train on all ranks: threads in a child process (`apart` false: in this one), or processes."""
    task = TrainTask(training.program, training.course, str(work / "texts"), training.sizes, vouch)
    ranks = request.rank_count
    if backend == "simulator":
        folder = str(prepared.program.path)
        return simulate(lambda c: train_rank(c, task), ranks, request.timeout, folder, apart, REFUSED)
    # the processes do not have the model: what they compile later is compiled here
    plain = replace(task, sizes=compiled_sizes(task.program, task.course)).plain()
    job = JobSpecification(
        "verify.programs.training.rank_loop:train_rank",
        ranks,
        {"task": plain},
        backend=backend,
        devices=tuple(devices_of(ranks)),
    )
    return run_job(job, request.timeout, prepared.context.server)


def compiled_sizes(program: Program, course: Course) -> dict[SizeClass, SentProgram]:
    """Compile the program for every other size of the course."""
    known = program.manifest.shapes
    modes = any(module.training for module in program.origin.module.modules()) if program.origin else False
    wanted: dict[SizeClass, Batch] = {}
    for batch, training in (
        *((b, True) for b in course.batches()),
        *(((course.evaluation, not modes),) if course.evaluation is not None else ()),
    ):
        shapes = tuple((name, tuple(batch[name].shape)) for name in known)
        wanted.setdefault(SizeClass(shapes, training), batch)
    first = SizeClass(tuple((name, tuple(shape)) for name, shape in known.items()), True)
    return {s: sent(for_batch(program, b, training=s.training)) for s, b in wanted.items() if s != first}


# The dtypes of training.


DTYPES = "training: dtypes of what the optimizer sees"
HALF = (torch.bfloat16, torch.float16)


def is_mixed(precision: object, state: Mapping[str, Tensor]) -> bool:
    """Return whether a program computes in a dtype that is narrower than float32."""
    return precision is not None or any(tensor.dtype in HALF for tensor in state.values())


def check_dtypes(ranks: Sequence[RankTraining], state: Mapping[str, Tensor]) -> CheckOutcome:
    """Compare the dtypes of parameters, gradients and optimizer states with those of the model's parameters."""
    tally = Tally(DTYPES, Verdict.TESTED_EXACT)
    for rank in ranks:
        for name, what, tensor, cause in _seen(rank):
            right = state[name].dtype
            if tensor.dtype == right:
                tally.add(Verdict.TESTED_EXACT)
                continue
            found, wanted = (dtype_name(d) for d in (tensor.dtype, right))
            message = f"training: the {what} of `{name}` is {found} on rank {rank.rank}, and the parameter is {wanted}"
            facts = {"tensor": name, "step": "0", "rank": str(rank.rank)}
            tally.refute(Finding("training_dtype_differs", message, None, facts, cause))
    return tally.outcome()


def _seen(rank: RankTraining) -> Iterator[tuple[str, str, Tensor, str]]:
    """Yield what the optimizer of a rank sees: parameter, what of it, the tensor, and what it means to be narrow."""
    step = rank.steps[0]
    for name, tensor in step.parameters.items():
        yield name, "tensor at rest", tensor, "there is no master copy: updates below its rounding are lost"
        gradient = step.gradients.get(name)
        if gradient is not None:
            yield name, "gradient", gradient, "the gradient is cast down before the optimizer has it"
        for key, value in step.states.get(name, {}).items():
            if value.dim() and value.is_floating_point():
                yield (
                    name,
                    f"optimizer's `{key}`",
                    value,
                    "the optimizer's state is in another dtype than its parameter",
                )
