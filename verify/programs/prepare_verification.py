"""Prepare a verification: the model with random parameters, its trace, the program, and the random numbers of both."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nnscaler
from nnscaler.compile import PlanSource, compile_traced, make, searched
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.mixed_precision_dtypes import Precision, parse_precision
from nnscaler.is_user_file import beside
from nnscaler.plan_source import wanted_plan
from nnscaler.tracing import Traced, trace
from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from nnscaler.transform.plan import Plan
from verify.programs.eager_reference import randomise_parameters, record_draws
from verify.programs.eager_with_program_draws import Draw, UnmatchedDraws, draws_of, match_draws
from verify.programs.loaded_model_and_plan import PlanSubject, RunContext
from verify.programs.opened_program import OpenedProgram, open_program
from verify.programs.request import PlanRequest


@dataclass(frozen=True)
class Prepared:
    """The model with its random parameters, and the program. `found`: the plan where one was searched; `name`: of the
    model, for the report; `context`: who is told of the run.

    draws      the graph's operation for each random call of the model, in order; None where there are none or they do
               not match
    unmatched  why they do not match; else None
    traced     None where only the program is known
    runs       the model has data, so that the program can be run and compared
    found      the plan, where one was searched
    built      the model's buffers as built, where the program existed before
    train_batches  of the user's own
    """

    model: nn.Module
    sample: SampleInputs
    program: OpenedProgram
    graph: Graph
    notes: tuple[str, ...]
    draws: tuple[Draw | None, ...] | None = None
    unmatched: str | None = None
    traced: Traced | None = None
    runs: bool = True
    found: Plan | None = None
    built: Mapping[str, torch.Tensor] = field(default_factory=dict)
    train_batches: Sequence[Any] = ()
    name: str = ""
    context: RunContext = field(default_factory=RunContext)


def prepare(request: PlanRequest, subject: PlanSubject, folder: Path, context: RunContext | None = None) -> Prepared:
    """Build, trace and compile; a new program is written to `folder`. Raises NnscalerError."""
    context = context or RunContext()
    given = subject.module_or_factory
    model = given if isinstance(given, nn.Module) else given()
    if not isinstance(model, nn.Module):
        raise NnscalerError("not_a_module", f"the factory returned {type(model).__name__}, not an nn.Module")
    runs = not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if runs or model is given:
        model = copied(model)  # the runs copy it once more: torch refuses a model as `weight_norm` leaves it
    if not runs and request.level == "run":
        message = "the model has parameters without data, so it cannot be run and compared"
        raise NnscalerError("meta_model", message, help="--level static proves what can be proved without data")
    sample = flatten_inputs(model, subject.sample_inputs)
    # a program that exists was compiled from the model as it is built
    buffers = () if request.program is None else model.named_buffers(remove_duplicate=False)
    built = {name: buffer.clone() for name, buffer in buffers}
    if runs:
        randomise_parameters(model, request.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced, program, found, why = _compile(request, subject, model, folder, context)
    planned = program.plan()
    told = () if planned is None else planned.notes
    notes = tuple(dict.fromkeys((*traced.notes, *why, *told, *(str(w.message) for w in caught if _is_note(w)))))
    _check_inputs(program, sample)
    for line in program.details:
        context.detail(line)
    if not runs:
        notes = (*notes, "the model has no data: the program was not run, and the trace not compared with the model")
    draws, unmatched = (None, None)
    if runs and request.level != "static":
        draws, unmatched = matched_draws(model, sample, traced.graph)
    return Prepared(
        model,
        sample,
        program,
        traced.graph,
        notes,
        draws,
        unmatched,
        traced,
        runs=runs,
        found=found,
        built=built,
        train_batches=subject.train_batches,
        name=subject.description.get("name") or type(model).__name__,
        context=context,
    )


def matched_draws(
    model: nn.Module, sample: SampleInputs, graph: Graph
) -> tuple[tuple[Draw | None, ...] | None, str | None]:
    """Return the operation of each random call of the model (None: it makes none), or why that is not known."""
    wanted = draws_of(graph)
    if not wanted:
        return None, None
    try:
        return match_draws(record_draws(model, sample).calls, wanted), None
    except UnmatchedDraws as error:
        return None, str(error)


def _is_note(warning: warnings.WarningMessage) -> bool:
    """Return whether the warning comes from the compiler, not from torch or the interpreter."""
    return issubclass(warning.category, UserWarning) and warning.filename.startswith(beside(nnscaler.__file__))


def _compile(
    request: PlanRequest, subject: PlanSubject, model: nn.Module, folder: Path, context: RunContext
) -> tuple[Traced, OpenedProgram, Plan | None, tuple[str, ...]]:
    """Return the trace, the program, and, where a plan was searched, this plan with a note on it."""
    opened = None
    if request.program is not None:
        opened = open_program(Path(request.program)).for_ranks(request.rank_count)
    started = time.perf_counter()
    precision = _precision(request, subject, opened)
    traced = trace(model, subject.sample_inputs, specialise=request.specialise, precision=precision)
    context.progress("trace", time.perf_counter() - started, f"{len(traced.graph.operations)} operations")
    if opened is not None:
        return traced, opened, None, ()
    plan = subject.plan
    found: Plan | None = None
    notes: tuple[str, ...] = ()
    if searched(plan) is not None:
        found, notes = _search(request, subject.plan, traced, context)
        found = replace(found, precision=precision)
        plan = found
    compiled = compile_traced(
        traced,
        wanted_plan(request, plan, request.rank_count, precision),
        model=subject.description or {"name": type(model).__name__},
        progress=context.progress,
    )
    if compiled.plan.orders and (not isinstance(plan, Plan) or not plan.orders):  # they were searched
        notes = (*notes, *compiled.plan.notes[-1:])
    return traced, open_program(compiled.save(folder)), found, notes


def _precision(request: PlanRequest, subject: PlanSubject, opened: OpenedProgram | None) -> Precision | None:
    """Return the mixed precision that is asked for, or that the program or the plan has."""
    asked = None if request.precision is None else parse_precision(request.precision)
    if opened is None:
        return asked or (subject.plan.precision if isinstance(subject.plan, Plan) else None)
    plan = opened.plan()
    own = None if plan is None else plan.precision
    if asked not in (None, own):
        said = "none" if own is None else own.describe()
        message = f"{opened.path} was compiled with the precision {said}, and {request.precision} is asked for"
        raise NnscalerError("plan_illegal", message, help="leave --precision out: a program has its own")
    return own


def _search(
    request: PlanRequest, source: PlanSource, traced: Traced, context: RunContext
) -> tuple[Plan, tuple[str, ...]]:
    started = time.perf_counter()
    planned = make(traced.graph, wanted_plan(request, source, request.rank_count, None))
    context.progress("search", time.perf_counter() - started, f"{planned.plan.describe()}: {planned.why}")
    return planned.plan, (f"the plan was {planned.why}",)


def _check_inputs(program: OpenedProgram, sample: SampleInputs) -> None:
    for name, shape in program.manifest.shapes.items():
        given = sample.tensors.get(name)
        if given is None or tuple(given.shape) != shape:
            found = "missing" if given is None else f"of shape {tuple(given.shape)}"
            raise NnscalerError(
                "inputs_differ",
                f"the program was compiled for an input `{name}` of shape {shape}, which is {found} in the sample",
                help="compile the model again",
            )
