"""The phases of verifying a plan: build, trace and compile, reference, run, compare, localise."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from op_registry.spec import SourceLocation

import nnscaler
from nnscaler.compile import PlanSource, Progress, parallelize
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.runtime.loader import load_role
from nnscaler.tracing import trace
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from verify.backends import run_program
from verify.calibrate import measure_condition, measure_tolerance
from verify.compare import is_finite
from verify.environment import environment
from verify.failure import Failure, finding_of
from verify.finding import Finding
from verify.localise import localise
from verify.places import Places
from verify.plan_checks import run_checks
from verify.plan_checks.context import Comparison, Outcome
from verify.plan_checks.logical import holdings_of
from verify.program_directory import ProgramDirectory, open_program
from verify.randomise import logical_state, randomise_parameters
from verify.rank_program import RankResult, Task
from verify.reference import Trajectory, names_of, run_reference
from verify.report import Check, Report
from verify.verdict import Verdict

if TYPE_CHECKING:
    from nnscaler.runtime.launcher import ForkServer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
BACKENDS = ("simulator", "gloo", "nccl")


@dataclass(frozen=True)
class PlanRequest:
    """What is to be verified. `program`: an already generated program, instead of generating one."""

    module_or_factory: nn.Module | Callable[[], nn.Module]
    sample_inputs: Mapping[str, Any] | Sequence[Any]
    ranks: int
    plan: PlanSource = None
    schedule: str | None = None
    micro_batches: int | None = 1
    replicate: Sequence[str] = ()
    specialise: bool = False
    backend: str = "simulator"
    steps: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    timeout: float = 120.0
    program: Path | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    reproduce: str | None = None
    server: ForkServer | None = None
    progress: Progress = lambda phase, seconds, text: None
    detail: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Prepared:
    """The model with its random parameters, and the program."""

    model: nn.Module
    sample: SampleInputs
    program: ProgramDirectory
    graph: Graph
    notes: tuple[str, ...]


def verify_request(request: PlanRequest) -> Report:
    """Runs all phases. Raises NnscalerError for what could not be run at all."""
    started = time.perf_counter()
    _check_request(request)
    with tempfile.TemporaryDirectory(prefix="nnscaler-verify-") as folder:
        work = Path(folder)
        prepared = _prepare(request, work / "program")
        reference = _reference(request, prepared)
        broken = _not_finite(reference)
        if broken is not None:
            outcomes = [Outcome(Check("reference", Verdict.INCONCLUSIVE, 0), (broken,))]
        else:
            outcomes = run_and_compare(request, prepared, reference, work)
        report = _report(request, prepared, reference, outcomes, time.perf_counter() - started)
        return report if report.verdict.passes else _keep_program(report, prepared.program.path, request)


def _check_request(request: PlanRequest) -> None:
    if request.backend not in BACKENDS:
        raise NnscalerError("usage", f"backend {request.backend!r} is none of {', '.join(BACKENDS)}")
    if request.backend == "nccl" and (gpus := torch.cuda.device_count()) < request.ranks:
        message = f"backend nccl needs a GPU for each rank: there are {gpus}, and {request.ranks} ranks"
        raise NnscalerError("usage", message, help="--backend gloo runs the ranks on what there is")
    if request.dtype not in DTYPES.values():
        raise NnscalerError("usage", f"dtype {request.dtype} is none of {', '.join(DTYPES)}")
    if request.steps < 1:
        raise NnscalerError("usage", "at least one step is needed")


def _prepare(request: PlanRequest, folder: Path) -> Prepared:
    given = request.module_or_factory
    model = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    if not isinstance(model, nn.Module):
        raise NnscalerError("not_a_module", f"the factory returned {type(model).__name__}, not an nn.Module")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise NnscalerError("meta_model", "the model has parameters without data, so it cannot be run and compared")
    sample = flatten_inputs(model, request.sample_inputs)
    randomise_parameters(model, request.seed)
    if request.dtype != torch.float64:
        _round_parameters(model, request.dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph, program = _compile(request, model, folder)
    notes = tuple(dict.fromkeys(str(w.message) for w in caught if _is_note(w)))
    _check_inputs(program, sample)
    for line in program.details:
        request.detail(line)
    return Prepared(model, sample, program, graph, notes)


def _is_note(warning: warnings.WarningMessage) -> bool:
    """Whether it is the compiler that says something, and not torch or the interpreter."""
    ours = str(Path(nnscaler.__file__).parent)
    return issubclass(warning.category, UserWarning) and warning.filename.startswith(ours)


def _compile(request: PlanRequest, model: nn.Module, folder: Path) -> tuple[Graph, ProgramDirectory]:
    if request.program is not None:
        started = time.perf_counter()
        opened = open_program(request.program)
        if opened.ranks != request.ranks:
            message = f"{request.program} is a program for {opened.ranks} ranks, not {request.ranks}"
            raise NnscalerError("plan_illegal", message, help=f"use --ranks {opened.ranks}")
        graph = trace(model, request.sample_inputs, specialise=request.specialise).graph
        request.progress("trace", time.perf_counter() - started, f"{len(graph.operations)} operations")
        return graph, opened
    compiled = parallelize(
        model,
        request.sample_inputs,
        ranks=request.ranks,
        plan=request.plan,
        schedule=request.schedule,
        micro_batches=request.micro_batches,
        replicate=request.replicate,
        specialise=request.specialise,
        model=request.model or None,
        progress=request.progress,
    )
    return compiled.graph, open_program(compiled.save(folder))


def _round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Both sides start from the same values, so they must be values of the dtype."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(dtype))


def _check_inputs(program: ProgramDirectory, sample: SampleInputs) -> None:
    for name, shape in program.inputs.items():
        given = sample.tensors.get(name)
        if given is None or tuple(given.shape) != shape:
            found = "missing" if given is None else f"of shape {tuple(given.shape)}"
            raise NnscalerError(
                "inputs_differ",
                f"the program was compiled for an input `{name}` of shape {shape}, which is {found} in the sample",
                help="compile the model again",
            )


def _reference(request: PlanRequest, prepared: Prepared) -> Trajectory:
    reference = run_reference(prepared.model, prepared.sample, steps=request.steps)
    request.progress("reference", reference.seconds, f"eager model, float64, {request.steps} steps of SGD")
    return reference


def _not_finite(reference: Trajectory) -> Finding | None:
    bad = [f"the loss of step {i}" for i, loss in enumerate(reference.losses) if not is_finite(loss)]
    for step, gradients in enumerate(reference.gradients):
        bad += [
            f"the gradient of `{n}` at step {step}" for n, g in gradients.items() if g is not None and not is_finite(g)
        ]
    if not bad:
        return None
    message = f"the model itself computes NaN or infinity: {bad[0]}"
    return Finding("reference_not_finite", message, help="its parameters were disturbed at random: try another --seed")


def run_and_compare(request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path) -> list[Outcome]:
    task = _task(request, prepared, reference, work)
    started = time.perf_counter()
    outcome = run_program(task, request.ranks, request.backend, request.timeout, request.server)
    seconds = time.perf_counter() - started
    if isinstance(outcome, Failure):
        request.progress("run", seconds, "did not end")
        return [_failed(outcome, prepared, seconds)]
    request.progress("run", seconds, f"{request.ranks} ranks on {request.backend}, {request.steps} steps")
    comparison = _comparison(request, prepared, reference, outcome)
    ran = Outcome(Check("program ran on every rank", Verdict.TESTED_EXACT, request.ranks, 0, seconds))
    outcomes = [ran, *_compare(request, prepared, comparison)]
    if any(o.check.verdict is Verdict.REFUTED for o in outcomes):
        started = time.perf_counter()
        found = localise(task, prepared.graph, prepared.program, Places(prepared.graph), request.timeout)
        request.progress(
            "localise", time.perf_counter() - started, "first tensor that differs" if found else "nothing more"
        )
        if found is not None:
            outcomes.insert(0, Outcome(Check("", Verdict.REFUTED, 0), (found,)))
    return outcomes


def _compare(request: PlanRequest, prepared: Prepared, comparison: Comparison) -> list[Outcome]:
    reference = comparison.reference
    buffers = {name: tensor for name, tensor in logical_state(prepared.model).items() if name in reference.buffers}
    outcomes = run_checks(comparison, buffers)
    if all(o.check.verdict.passes for o in outcomes):
        return outcomes
    # is the model so ill-conditioned that rounding explains it? asked only now, for it costs another reference run
    condition = measure_condition(prepared.model, prepared.sample, reference, comparison.tolerance, request.steps)
    return run_checks(replace(comparison, tolerance=condition), buffers)


def _task(request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path) -> Task:
    state = {**prepared.program.state(), **logical_state(prepared.model)}
    torch.save(state, work / "state.pt")
    torch.save(dict(prepared.sample.tensors), work / "batch.pt")
    name = next(n for n, dtype in DTYPES.items() if dtype == request.dtype)
    return Task(
        str(prepared.program.path),
        str(work / "state.pt"),
        str(work / "batch.pt"),
        request.steps,
        reference.learning_rate,
        name,
    )


def _comparison(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, results: tuple[RankResult, ...]
) -> Comparison:
    modules = [load_role(prepared.program.path / file) for file in prepared.program.role_files]
    parameters, buffers = holdings_of(modules)
    tolerance = measure_tolerance(prepared.model, prepared.sample, reference, request.dtype, request.steps)
    places = Places(prepared.graph)
    names, used = names_of(prepared.model), places.of_parameters()
    loss = prepared.graph.loss
    return Comparison(
        reference, results, parameters, buffers, names, used, tolerance, request.steps, loss, places.of_tensor(loss)
    )


def _failed(failure: Failure, prepared: Prepared, seconds: float) -> Outcome:
    refuted = int(failure.verdict is Verdict.REFUTED)
    check = Check("program ran on every rank", failure.verdict, refuted, refuted, seconds)
    return Outcome(check, (finding_of(failure, prepared.program.path, Places(prepared.graph)),))


def _report(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, outcomes: Sequence[Outcome], seconds: float
) -> Report:
    program = prepared.program
    notes = [*prepared.notes, *program.changes]
    if _has_dropout(prepared.graph):
        notes.append("dropout was switched off on both sides: a program draws its own random numbers")
    if any(op.operator.startswith("nnscaler.random_") for op in prepared.graph.operations):
        notes.append("other random numbers were the same on both sides: a function of their place in the tensor")
    if program.unannotated:
        names = ", ".join(program.unannotated)
        notes.append(f"without annotation, so run whole on every rank: {names} (register_op gives one)")
    if not any(outcome.check.count for outcome in outcomes) and not any(o.findings for o in outcomes):
        outcomes = [*outcomes, Outcome(Check("", Verdict.INCONCLUSIVE, 0), (_nothing(),))]
    findings = sorted((f for outcome in outcomes for f in outcome.findings), key=_urgency)
    checks = tuple(outcome.check for outcome in outcomes if outcome.check.name)
    name = request.model.get("name") or type(prepared.model).__name__
    return Report(
        "verify-plan",
        name,
        f"on {request.ranks} rank{'s' * (request.ranks != 1)}" + (f" ({program.summary})" if program.summary else ""),
        request.seed,
        checks,
        tuple(f.with_reproduce(request.reproduce) for f in findings),
        tuple(dict.fromkeys(notes)),
        {
            **environment(),
            "backend": request.backend,
            "dtype": str(request.dtype).removeprefix("torch."),
            "steps": str(request.steps),
            "learning_rate": f"{reference.learning_rate:g}",
            "plan": json.dumps(program.axes),
        },
        seconds,
    )


def _nothing() -> Finding:
    return Finding("nothing_checked", "there was nothing to compare")


def _urgency(finding: Finding) -> tuple[bool, int]:
    """Where it goes wrong first, then what differs at the first step: the rest follows from it."""
    return not finding.code.startswith("tensor_"), int(finding.counter_example.get("step", "0"))


def _has_dropout(graph: Graph) -> bool:
    attention = "aten.scaled_dot_product_attention.default"
    return any(
        "dropout" in op.operator or (op.operator == attention and len(op.args) > 4 and bool(op.args[4]))
        for op in graph.operations
    )


def _keep_program(report: Report, program: Path, request: PlanRequest) -> Report:
    """Moves the program out of the temporary folder, for findings name its lines."""
    if request.program is not None or not report.findings:
        return report
    kept = Path(tempfile.mkdtemp(prefix="nnscaler-program-"))
    shutil.copytree(program, kept, dirs_exist_ok=True)

    def moved(finding: Finding) -> Finding:
        related = tuple((what, _moved(place, program, kept)) for what, place in finding.related)
        return replace(finding, related=related)

    findings = tuple(moved(f) for f in report.findings)
    return replace(report, findings=findings, notes=(*report.notes, f"the program is kept in {kept}"))


def _moved(place: SourceLocation, old: Path, new: Path) -> SourceLocation:
    return replace(place, file=place.file.replace(str(old), str(new)))
