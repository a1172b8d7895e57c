"""`nnscaler verify-plan`: compile a model, run the program, and compare it with the model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import write_text
from nnscaler.cli.options import (
    MODEL_HELP,
    add_plan_options,
    add_report_options,
    add_search_options,
    positive,
    request_of,
    seconds,
    seed_number,
)
from nnscaler.cli.output.communication_profile import add_option, known_profile, show_profile
from nnscaler.errors import NnscalerError
from nnscaler.records_as_json import encode

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.programs.loaded_model_and_plan import RunContext
    from verify.programs.request import PlanRequest
    from verify.results.report import Report

TIMEOUT_HELP = (
    "seconds the program may run, and of processor time its proof may take; waiting while the machine is busy with "
    "something else does not count (default: 300)"
)
NAME = "verify-plan"
HELP = "compile a model, run the program on every rank, and compare it with the model"
DESCRIPTION = "Compile a model into a program for many ranks, run it, and say whether it equals the model."
EPILOG = """examples:
  nnscaler verify-plan gpt.py --ranks 8                          search the fastest plan for this machine
  nnscaler verify-plan gpt.py --ranks 8 --cluster h100x8 --memory 40GB   the plan for another one
  nnscaler verify-plan gpt.py --ranks 6 --plan tp=2,pp=3 --schedule gpipe --micro-batches 6
  nnscaler verify-plan gpt.py::small_model --ranks 4 --plan my_policies.py::every_second_layer
  nnscaler verify-plan gpt.py --ranks 4 --replicate 'lm_head*'   leave a module whole
  nnscaler verify-plan gpt.py --program build/                   check a program that was edited
  nnscaler verify-plan gpt.py --ranks 8 --output-format json=report.json --html report.html
  nnscaler verify-plan llama_405b.py::llama_8b --plan dp=2,pp=2,tp=2 --level static     prove it, run nothing
  nnscaler verify-plan gpt.py --plan dp=2,zero=1 --train         train it, too: optimizer, clipping, schedule, sizes

first the program's text is read and proved, for all values and for all batches that divide; nothing runs for that.
Then it runs. What is compared, with the model run eagerly on the whole batch: the loss of every step, every gradient
put together from its shards, parameters and buffers after the steps, and copies bitwise; the last step clips the
gradients, and dropout draws the same on both sides. Then single steps with other loss scales and with unequal labels,
the loss without backward, and a checkpoint. Parameters are disturbed at random first.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_plan_options(parser)
    add_search_options(parser)
    _add_run(parser)
    _add_training(parser)
    add_option(parser)
    add_report_options(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    from nnscaler.ir.mixed_precision_dtypes import FLOATS
    from verify.programs.request import BACKENDS, PROCESS_LIMIT

    group = parser.add_argument_group("run")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help=f"simulator: threads of this process; gloo, nccl: a process per rank (default: gloo up to {PROCESS_LIMIT} "
        "ranks and the simulator above; nccl on a machine with a GPU per rank)",
    )
    group.add_argument("--steps", type=positive, default=2, metavar="K", help="steps of SGD to compare (default: 2)")
    group.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of parameters and sample batch (default: 0)"
    )
    group.add_argument(
        "--dtype",
        choices=FLOATS,
        default="float64",
        help="float64 (default) compares up to float64 rounding; the others up to the model's own rounding noise",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="run the forward of each stage compiled with torch.compile, as `nnscaler train --compile=true` does",
    )
    group.add_argument("--timeout", type=seconds, default=300.0, metavar="S", help=TIMEOUT_HELP)
    group.add_argument(
        "--program", type=Path, metavar="DIR", help="verify this program, written by `nnscaler compile`, as it is"
    )
    group.add_argument(
        "--own-weights",
        action="store_true",
        help="with --program: its weights were replaced on purpose, and need not be those that it was compiled with",
    )
    group.add_argument(
        "--level",
        choices=("all", "static", "run"),
        default="all",
        help="static: read and prove the program's text, run nothing; run: the other way round (default: all)",
    )
    group.add_argument("--certificate", type=Path, metavar="PATH", help="write what was proved, and on what it rests")
    group.add_argument("--no-cache", action="store_true", help="show every lemma about operators again; for releases")
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--quick",
        action="store_true",
        help="training alone: no other loss scale or labels, loss without backward or checkpoint",
    )
    how.add_argument(
        "--deep", action="store_true", help="more loss scales, the checkpoint under another plan, a run in bfloat16"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    from verify.programs.request import BACKENDS

    group = parser.add_argument_group("training")
    group.add_argument(
        "--train",
        action="store_true",
        help="also train by the engine: a real optimizer with weight decay by groups, a schedule and clipping, on "
        "another batch in each step, a short one at the end, then an evaluation; all against the eager model",
    )
    group.add_argument(
        "--train-steps", type=positive, default=5, metavar="K", help="optimizer steps of --train (default: 5)"
    )
    group.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help="of --train: adamw, sgd, package.module::Class or file.py::Class (default: adamw)",
    )
    group.add_argument(
        "--train-backend",
        choices=BACKENDS,
        help="as --backend, of --train (default: the --backend that is asked for, else the simulator)",
    )


def run(options: argparse.Namespace) -> int:
    """Verify, print the report, and return the verdict's exit code."""
    from nnscaler.cli.output.print_reports import print_report

    request = plan_request(options)
    _check_outputs(options, request)
    report = verify(request, options.console, cached=not options.no_cache)
    print_report(report, options.output_format, options.console)
    if options.certificate is not None:
        _write_certificate(options.certificate, report, options.console)
    show_profile(report.attachments.communication_profile, options.comm_profile, options.console)
    return report.exit_code


def plan_request(options: argparse.Namespace) -> PlanRequest:
    """Return what the options say is to be verified."""
    from verify.programs.request import PlanRequest

    depth = "quick" if options.quick else "deep" if options.deep else "default"
    return request_of(PlanRequest, options, depth=depth)


def verify(request: PlanRequest, console: Console, *, cached: bool = True) -> Report:
    """Verify what the request says, and tell the console. Raises NnscalerError for what could not be run."""
    from verify.programs.verify_request import verify_request

    return verify_request(request, context=replace(run_context(console), cached=cached))


def run_context(console: Console) -> RunContext:
    """Return the context of a run of this command line that tells the console how it goes."""
    from verify.programs.loaded_model_and_plan import RunContext

    return RunContext(console.phase, console.detail, console.progress, ("nnscaler", *sys.argv[1:]))


def _check_outputs(options: argparse.Namespace, request: PlanRequest) -> None:
    """Check that what is to be written will be there. Raises NnscalerError."""
    if options.certificate is not None and request.level == "run":
        message = "--certificate writes what was proved, and --level run proves nothing"
        raise NnscalerError("usage", message, help="--level static, or all")
    if options.comm_profile is not None and options.program is not None:
        from verify.programs.opened_program import open_program

        known_profile(open_program(options.program).manifest.communication_profile)


def _write_certificate(path: Path, report: Report, console: Console) -> None:
    """Write the proof as JSON; where there is none, warn and write no file: an old certificate would be believed."""
    import json

    found = report.attachments.certificate
    if found is None or not found.proved or report.exit_code != 0:
        console.warning(f"{path} was not written: the program is not proved")
        path.unlink(missing_ok=True)
        return
    write_text(path, json.dumps(encode(found), indent=1) + "\n")
