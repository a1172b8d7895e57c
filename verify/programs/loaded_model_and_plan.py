"""The loaded model and plan beside a `PlanRequest`, which holds no objects; and who is told of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnscaler.model_file import load_model_file
from nnscaler.plan_source import plan_source
from verify.programs.opened_program import open_program

if TYPE_CHECKING:
    from torch import nn

    from nnscaler.compile import PlanSource, Progress
    from nnscaler.runtime.jobs.launcher import ForkServer
    from verify.programs.request import PlanRequest


@dataclass(frozen=True)
class PlanSubject:
    """The model, its batch and its plan as objects: loaded from a request's files, or handed over by Python.

    plan         None where the request has a program; what is to be searched is a plan as well
    description  of the model, for the program's manifest
    """

    module_or_factory: nn.Module | Callable[[], nn.Module]
    sample_inputs: Mapping[str, Any] | Sequence[Any]
    plan: PlanSource = None
    description: Mapping[str, str] = field(default_factory=dict)
    train_batches: Sequence[Any] = ()


@dataclass(frozen=True)
class RunContext:
    """Who is told how the run goes, and what it runs in. None of it changes what is verified.

    progress  the phase, its seconds, and what came out
    detail    lines that only a verbose run shows
    say       other lines on how it goes
    command   the words of the command line, shown where a token would be too long for one; None: findings have no line
              that reproduces them
    server    to start ranks from
    cached    take lemmas about operators that were shown before
    """

    progress: Progress = lambda phase, seconds, text: None
    detail: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda text: None
    command: tuple[str, ...] | None = None
    server: ForkServer | None = None
    cached: bool = True


def load_subject(request: PlanRequest, say: Callable[[str], None]) -> PlanSubject:
    """Import the files that a request names. Raises NnscalerError as `plan_source` and `load_model_file`."""
    plan = None if request.program is not None else plan_source(request)
    model = load_model_file(str(request.model), request.seed, _loss(request))
    say(f"load         {model.name}")
    batches = model.batches(request.train_steps + 1) if request.train else ()
    return PlanSubject(model.build, model.inputs, plan, model.description(), batches)


def _loss(request: PlanRequest) -> str | None:
    """Return the loss function outside of the model: the one that is named, else the one that the program has."""
    if request.loss_fn is not None or request.program is None:
        return request.loss_fn
    from nnscaler.tracing.models_with_added_loss import recorded_loss

    recorded = open_program(Path(request.program)).loss
    if recorded is not None:
        recorded_loss(recorded)  # says what is missing
    return recorded
