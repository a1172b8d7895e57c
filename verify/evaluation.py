"""Evaluation mode: what the model computes after `.eval()`, and the program that should compute the same.

A model that does the same in both modes is evaluated by its training program, forward only. One that does not (dropout,
batch norm) is traced again in evaluation mode, compiled under the same plan, and that program is evaluated.
"""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from nnscaler.compile import PlanSource, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.tracing import trace
from nnscaler.transform.plan import AssignStep, OrderStep, Plan, RecomputeStep, ReplicateStep, RestStep, SplitStep, Step
from nnscaler.transform.select import select
from verify.compare import difference, is_finite
from verify.plan_prepare import Prepared
from verify.plan_request import PlanRequest
from verify.reference import evaluate
from verify.tolerance import FLOAT64_BOUND


@dataclass(frozen=True)
class Evaluation:
    """`program`: the directory of the program to be evaluated; `own`: it was compiled for evaluation mode."""

    loss: Tensor
    program: Path
    own: bool


def plan_evaluation(request: PlanRequest, prepared: Prepared, folder: Path) -> tuple[Evaluation | None, str | None]:
    """What to evaluate, or a note that says why nothing is."""
    if request.depth == "quick" or not request.exact:
        return None, None
    started = time.perf_counter()
    try:
        loss = evaluate(prepared.model, prepared.sample)
        if not is_finite(loss):
            return None, "evaluation mode was not compared: the model's loss is not finite in it"
        if _same_in_both_modes(prepared, loss):
            return Evaluation(loss, prepared.program.path, False), None
        if request.program is not None:
            return None, "evaluation mode was not compared: the model does something else in it, and the program trains"
        program = _compile(request, prepared, folder)
    except NnscalerError as error:
        return None, f"evaluation mode was not compared: {error.message}"
    request.progress("evaluation", time.perf_counter() - started, "traced and compiled in evaluation mode")
    return Evaluation(loss, program, True), None


def _same_in_both_modes(prepared: Prepared, loss: Tensor) -> bool:
    """The graph has nothing that differs by its nature, and the losses agree."""
    if any(_differs(op.operator) for op in prepared.graph.operations):
        return False
    trained = evaluate(prepared.model, prepared.sample, train=True)
    return difference(trained, loss).relative <= FLOAT64_BOUND


def _differs(operator: str) -> bool:
    return "dropout" in operator or operator == "nnscaler.batch_mean"


def _compile(request: PlanRequest, prepared: Prepared, folder: Path) -> Path:
    model = copy.deepcopy(prepared.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes of the training program say the same
        traced = trace(model, request.sample_inputs, self_check=False, specialise=request.specialise, evaluation=True)
        compiled = compile_traced(
            traced,
            ranks=request.ranks,
            plan=_for_graph(request.plan, traced.graph),
            schedule=request.schedule,
            micro_batches=request.micro_batches,
            replicate=request.replicate,
            model={"name": type(model).__name__},
        )
    return compiled.save(folder)


def _for_graph(plan: PlanSource, graph: Graph) -> PlanSource:
    """A plan without what names operations that only training has."""
    if not isinstance(plan, Plan):
        return plan
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, OrderStep):
            first, second = _known(step.first, graph), _known(step.second, graph)
            steps += [replace(step, first=first, second=second)] if first and second else []
        elif isinstance(step, SplitStep | ReplicateStep | AssignStep | RecomputeStep):
            operations = _known(step.operations, graph)
            steps += [replace(step, operations=operations)] if operations else []
        elif isinstance(step, RestStep):
            steps.append(step)
    return replace(plan, steps=tuple(steps))


def _known(patterns: tuple[str, ...], graph: Graph) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if _names_something(pattern, graph))


def _names_something(pattern: str, graph: Graph) -> bool:
    try:
        return bool(select(graph, (pattern,)))
    except NnscalerError:
        return False
