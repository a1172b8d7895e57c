"""`nnscaler verify-plan`: compile a model, run the program, and compare it with the model."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.before import check_options
from nnscaler.cli.comm_profile import add_option, show_profile
from nnscaler.cli.options import (
    MODEL_HELP,
    add_plan_options,
    add_report_options,
    add_search_options,
    positive,
    seconds,
)
from nnscaler.files import check_temporary, write_text

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from nnscaler.runtime.launcher import ForkServer
    from verify.plan_run import PlanRequest
    from verify.report import Report

BACKENDS = ("simulator", "gloo", "nccl")
PROCESS_LIMIT = 16  # more ranks than this run as threads: processes would only swap
TIMEOUT_HELP = (
    "seconds the program may run, and of processor time its proof may take; waiting while the machine is busy with "
    "something else does not count (default: 300)"
)
EPILOG = """examples:
  nnscaler verify-plan gpt.py --ranks 8                          search the fastest plan for this machine
  nnscaler verify-plan gpt.py --ranks 8 --cluster h100x8 --memory 40GB   the plan for another one
  nnscaler verify-plan gpt.py --ranks 6 --plan tp=2,pp=3 --schedule gpipe --micro-batches 6
  nnscaler verify-plan gpt.py::small_model --ranks 4 --plan my_policies.py::every_second_layer
  nnscaler verify-plan gpt.py --ranks 4 --replicate 'lm_head*'   leave a module whole
  nnscaler verify-plan gpt.py --program build/                   check a program that was edited
  nnscaler verify-plan gpt.py --ranks 8 --output-format json=report.json --html report.html
  nnscaler verify-plan llama_405b.py::llama_8b --plan dp=2,pp=2,tp=2 --level static     prove it, run nothing

first the program's text is read and proved, for all values and for all batches that divide; nothing runs for that.
Then it runs. What is compared, with the model run eagerly on the whole batch: the loss of every step, every gradient
put together from its shards, parameters and buffers after the steps, and copies bitwise; the last step clips the
gradients, and dropout draws the same on both sides. Then single steps with other loss scales and with unequal labels,
the loss without backward, and a checkpoint. Parameters are disturbed at random first.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify-plan",
        help="compile a model, run the program on every rank, and compare it with the model",
        description="Compile a model into a program for many ranks, run it, and say whether it equals the model.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_plan_options(parser)
    add_search_options(parser)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help=f"simulator: threads of this process; gloo, nccl: a process per rank (default: gloo up to {PROCESS_LIMIT} "
        "ranks and the simulator above; nccl on a machine with a GPU per rank)",
    )
    group.add_argument("--steps", type=positive, default=2, metavar="K", help="steps of SGD to compare (default: 2)")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of parameters and sample batch (default: 0)")
    group.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        default="float64",
        help="float64 (default) compares up to float64 rounding; the others up to the model's own rounding noise",
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
    how = group.add_mutually_exclusive_group()
    how.add_argument(
        "--quick",
        action="store_true",
        help="training alone: no other loss scale or labels, loss without backward or checkpoint",
    )
    how.add_argument(
        "--deep", action="store_true", help="more loss scales, the checkpoint under another plan, a run in bfloat16"
    )
    add_option(parser)
    add_report_options(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Verify, print the report, and return the verdict's exit code."""
    from nnscaler.cli.show import print_report

    report = verify(options)
    print_report(report, options.output_format, options.console)
    if options.certificate is not None:
        _write_certificate(options.certificate, report, options.console)
    show_profile(report.attachments.get("communication_profile"), options.comm_profile, options.console)
    return report.exit_code


def verify(options: argparse.Namespace) -> Report:
    """Verify the program of these options. Raises NnscalerError where it could not be run."""
    check_options(options)
    check_temporary()
    ranks = _ranks(options)
    with contextlib.ExitStack() as stack:
        server = None
        if options.backend != "simulator" and (options.backend or ranks <= PROCESS_LIMIT):
            from verify.backends import start_server

            server = stack.enter_context(start_server())  # imports torch while this process traces the model
        from verify.plan_run import verify_request

        return verify_request(_request(options, ranks, server))


def _write_certificate(path: Path, report: Report, console: Console) -> None:
    """Write the proof as JSON; where there is none, warn and write no file: an old certificate would be believed."""
    import json

    found = report.attachments.get("certificate")
    if found is None or not found["proved"] or report.exit_code != 0:
        console.warning(f"{path} was not written: the program is not proved")
        path.unlink(missing_ok=True)
        return
    write_text(path, json.dumps(found, indent=1) + "\n")


def _request(options: argparse.Namespace, ranks: int, server: ForkServer | None) -> PlanRequest:
    from nnscaler.cli.model_file import load_model_file
    from nnscaler.cli.plan_cost import plan_source
    from nnscaler.cli.plan_replay import reproduce_line
    from verify.plan_run import DTYPES, PlanRequest

    console: Console = options.console
    backend = options.backend or default_backend(ranks)
    plan = plan_source(options)
    model = load_model_file(options.model, options.seed, _loss(options))
    console.progress(f"load         {model.name}")
    return PlanRequest(
        model.build,
        model.inputs,
        ranks=ranks,
        plan=plan,
        schedule=options.schedule,
        micro_batches=options.micro_batches,
        replicate=tuple(options.replicate),
        specialise=options.specialise,
        backend=backend,
        steps=options.steps,
        seed=options.seed,
        dtype=DTYPES[options.dtype],
        timeout=options.timeout,
        depth="quick" if options.quick else "deep" if options.deep else "default",
        level=options.level,
        program=options.program,
        own_weights=options.own_weights,
        model=model.description(),
        reproduce=lambda found: reproduce_line(options, ranks, backend, found),
        server=server,
        detail=console.detail,
        progress=lambda phase, taken, text: console.progress(f"{phase:<12} {taken:5.1f} s  {text}"),
    )


def _loss(options: argparse.Namespace) -> str | None:
    """Return the loss function outside of the model: the one that is named, else the one that the program has."""
    if options.loss_fn is not None or options.program is None:
        return None if options.loss_fn is None else str(options.loss_fn)
    from nnscaler.tracing.user_loss import recorded_loss
    from verify.program_directory import open_program

    recorded = open_program(options.program).loss
    if recorded is not None:
        recorded_loss(recorded)  # says what is missing
    return recorded


def default_backend(ranks: int) -> str:
    """Real processes where that is bearable; the GPUs where there are some."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= ranks:
        return "nccl"
    return "gloo" if ranks <= PROCESS_LIMIT else "simulator"


def _ranks(options: argparse.Namespace) -> int:
    from nnscaler.cli.plan_source import ranks_asked

    console: Console = options.console
    implied = ranks_asked(options)
    if implied is None:
        console.progress("2 ranks, for --ranks was not given")
    return implied or 2
