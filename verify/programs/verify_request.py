"""`verify_request`: the one way from what is to be verified to a report.

What can be said of a request without torch and without the user's code is said first, for those take seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import check_temporary
from nnscaler.errors import NnscalerError
from nnscaler.model_file import check_targets
from nnscaler.plan_source import check_plan, ranks_asked, search_given
from verify.programs.loaded_model_and_plan import PlanSubject, RunContext, load_subject
from verify.programs.opened_program import open_program
from verify.programs.request import PROCESS_LIMIT, PlanRequest

if TYPE_CHECKING:
    from verify.results.report import Report

_OF_A_PLAN = ("plan", "schedule", "micro_batches", "replicate")  # what a program has decided


def verify_request(
    request: PlanRequest, subject: PlanSubject | None = None, context: RunContext | None = None
) -> Report:
    """Verify what the request says.

    `subject`: the model and the plan where Python hands them over; else the request's files are checked and loaded.
    Raises NnscalerError for what could not be run at all.
    """
    context = context or RunContext()
    if subject is None:
        check_usage(request)
        check_temporary()
    request = replace(request, ranks=_ranks(request, context.say))
    with contextlib.ExitStack() as stack:
        if subject is None and _in_processes(request):
            from verify.programs.execution.run_on_backend import start_server

            # it imports torch while this process traces the model
            context = replace(context, server=stack.enter_context(start_server()))
        from verify.programs.verification_phases import run_phases

        request = replace(request, train_backend=request.train_backend or request.backend)
        request = replace(request, backend=request.backend or default_backend(request.rank_count))
        return run_phases(request, subject or load_subject(request, context.say), context)


def check_usage(request: PlanRequest) -> None:
    """Check the files, the plan and the search that a request names, and that its values go together.

    Raises NnscalerError, `usage` among others.
    """
    check_targets(str(request.model), request.loss_fn)
    if request.level == "static" and not request.exact:
        message = f"--dtype {request.dtype} is the dtype of a run, and --level static runs nothing"
        raise NnscalerError("usage", message, help="--level run, or all")
    if request.level == "static" and request.compile:
        message = "--compile says how a program is run, and --level static runs nothing"
        raise NnscalerError("usage", message, help="--level run, or all")
    if request.own_weights and request.program is None:
        message = "--own-weights is about the weights in a program's folder, and none is given"
        raise NnscalerError("usage", message, help="name the folder: --program DIR")
    if request.program is None:
        check_plan(request)
    else:
        _check_program(request, request.program)


def _check_program(request: PlanRequest, program: str) -> None:
    given = search_given(request)
    if given is not None:
        raise NnscalerError("usage", f"{given} is for the search of a plan, and --program has a plan already")
    for name in _OF_A_PLAN:
        if getattr(request, name):
            message = f"--{name.replace('_', '-')} is for a program that is compiled, and --program names one that is"
            raise NnscalerError("usage", message, help="leave one of them away")
    opened = open_program(Path(program))
    if request.ranks is not None:
        opened.for_ranks(request.ranks)


def _ranks(request: PlanRequest, say: Callable[[str], None]) -> int:
    """Return the ranks of the request, of its program or of its plan; 2 where none of them says how many."""
    if request.ranks is None and request.program is not None:
        return open_program(Path(request.program)).ranks
    implied = ranks_asked(request)
    if implied is None:
        say("2 ranks, for --ranks was not given")
    return implied or 2


def _in_processes(request: PlanRequest) -> bool:
    """Return whether the ranks are processes, as far as that is known without torch."""
    if request.backend is not None:
        return request.backend != "simulator"
    return request.rank_count <= PROCESS_LIMIT


def default_backend(ranks: int) -> str:
    """Return real processes where that is bearable; the GPUs where there are some."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= ranks:
        return "nccl"
    return "gloo" if ranks <= PROCESS_LIMIT else "simulator"
