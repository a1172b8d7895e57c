"""Check a command's options before all that takes long: torch, the user's file, a trace, a search.

Each check is the function that reads the option for good later on: nothing is decided twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nnscaler.cli.model_file import check_targets
from nnscaler.errors import NnscalerError
from nnscaler.planning.auto import AutoPlan, cluster_of

_OF_A_PLAN = ("plan", "schedule", "micro_batches", "replicate")  # options that a program has decided


def check_options(options: argparse.Namespace) -> None:
    """Check the model, the plan and the search that a command line names. Raises NnscalerError."""
    from nnscaler.cli.plan_cost import asked_search
    from nnscaler.cli.plan_source import check_plan
    from nnscaler.scheduling.registry import check_schedule

    check_targets(options.model, options.loss_fn)
    if getattr(options, "level", "all") == "run" and options.certificate is not None:
        message = "--certificate writes what was proved, and --level run proves nothing"
        raise NnscalerError("usage", message, help="--level static, or all")
    if getattr(options, "level", "all") == "static" and options.dtype != "float64":
        message = f"--dtype {options.dtype} is the dtype of a run, and --level static runs nothing"
        raise NnscalerError("usage", message, help="--level run, or all")
    if getattr(options, "own_weights", False) and options.program is None:
        message = "--own-weights is about the weights in a program's folder, and none is given"
        raise NnscalerError("usage", message, help="name the folder: --program DIR")
    wanted = asked_search(options)  # refuses options of a search beside a plan that is named
    if getattr(options, "program", None) is not None:
        _check_program(options)
        return
    check_schedule(getattr(options, "schedule", None), searched=wanted is not None)
    if wanted is None:
        check_plan(options.plan, options.ranks)
    else:
        _check_search(wanted, options.ranks or 2)


def _check_program(options: argparse.Namespace) -> None:
    from verify.program_directory import open_program

    for name in _OF_A_PLAN:
        if getattr(options, name):
            message = f"--{name.replace('_', '-')} is for a program that is compiled, and --program names one that is"
            raise NnscalerError("usage", message, help="leave one of them away")
    program = open_program(options.program)
    if options.ranks is not None:
        program.for_ranks(options.ranks)
    if options.comm_profile is not None:
        from nnscaler.cli.comm_profile import known_profile

        known_profile(program.manifest.get("communication_profile"))


def _check_search(wanted: AutoPlan, ranks: int) -> None:
    from nnscaler.planning.constraints import parse_constraints
    from nnscaler.planning.cost.table import load_profile

    if wanted.cluster is not None:  # looking for what this machine has takes torch
        cluster_of(wanted, ranks)
    if wanted.constraints is not None:
        parse_constraints(Path(str(wanted.constraints)))
    if wanted.profile is not None:
        load_profile(wanted.profile)
