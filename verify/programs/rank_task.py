"""Prepare the task that the ranks run, and the comparison that the checks work on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nnscaler.files import save_tensors
from nnscaler.runtime.program.loader import load_role
from verify.programs.checks.context import CheckOutcome, Comparison
from verify.programs.checks.logical import holdings_of
from verify.programs.execution.failure import Failure, finding_of
from verify.programs.execution.rank_program import RankResult, Task
from verify.programs.prepare import Prepared
from verify.programs.reference.eager import Trajectory, logical_state, names_of
from verify.programs.request import PlanRequest
from verify.programs.role_text import SourceMap
from verify.programs.single_steps import Trial
from verify.results.report import Check
from verify.results.tolerance import exact_tolerance
from verify.results.verdict import Verdict


@dataclass(frozen=True)
class Beside:
    """Runs besides the training steps; `notes` names those that could not be made."""

    trials: tuple[Trial, ...] = ()
    forward_only: bool = False
    checkpoint: bool = False
    notes: tuple[str, ...] = ()


def make_task(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path, beside: Beside | None = None
) -> Task:
    """Make the task of the ranks and write its files to `work`."""
    extra = beside or Beside()
    # constants are the model's, as parameters and buffers are: those of the folder are compared with them apart
    made = (prepared.program.state() or {}) if prepared.traced is None else prepared.traced.state
    state = {**{name: tensor.detach() for name, tensor in made.items()}, **logical_state(prepared.model)}
    save_tensors(state, work / "state.pt")
    save_tensors(dict(prepared.sample.tensors), work / "batch.pt")
    return Task(
        str(prepared.program.path),
        str(work / "state.pt"),
        str(work / "batch.pt"),
        request.steps,
        reference.learning_rate,
        request.dtype,
        draws=prepared.unmatched is None,  # also where the model draws nothing: the program must not either
        seed=reference.settings.seed,
        max_norm=reference.settings.max_norm,
        trials=tuple(trial.task(work) for trial in extra.trials),
        forward_only=extra.forward_only,
        checkpoint=str(work / "checkpoint") if extra.checkpoint else None,
    )


def make_comparison(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, results: tuple[RankResult, ...]
) -> Comparison:
    """Make the input of the checks from the model's results and the ranks' results."""
    modules = [load_role(prepared.program.path / file) for file in prepared.program.role_files]
    parameters, buffers = holdings_of(modules)
    places = SourceMap(prepared.graph)
    names, used = names_of(prepared.model), places.of_parameters()
    loss = prepared.graph.loss
    return Comparison(
        reference,
        results,
        parameters,
        buffers,
        names,
        used,
        exact_tolerance(),
        request.steps,
        loss,
        places.of_tensor(loss),
    )


def failed(failure: Failure, prepared: Prepared, seconds: float) -> CheckOutcome:
    refuted = int(failure.verdict is Verdict.REFUTED)
    check = Check("program ran on every rank", failure.verdict, refuted, refuted, seconds)
    return CheckOutcome(check, (finding_of(failure, prepared.program.path, SourceMap(prepared.graph)),))
