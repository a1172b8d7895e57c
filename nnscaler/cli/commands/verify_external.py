"""`nnscaler verify-external`: verify that a parallel program that nnScaler did not write equals the plain model."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from nnscaler.cli.commands.verify_plan import run_context
from nnscaler.cli.options import add_report_options, positive, request_of, seconds, seed_number
from nnscaler.cli.output.communication_profile import add_option, show_profile

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.external.request import ExternalRequest
    from verify.results.report import Report

NAME = "verify-external"
HELP = "run a parallel program of your own (FSDP2, DTensor, pipelines), and compare it with the plain model"
DESCRIPTION = "Run a parallel program that nnScaler did not write, and say whether it equals the plain model."
EPILOG = """examples:
  nnscaler verify-external check.py --ranks 4                    your parallelize() against your plain model
  nnscaler verify-external check.py::parallelize_tp --mesh tp=2  another function of the file, another mesh
  nnscaler verify-external check.py --mesh dp=2,tp=2 --dtype float64 bfloat16 --checkpoint
  nnscaler verify-external check.py --ranks 2 --executor both    threads, then processes: they must agree
  nnscaler verify-external hf:llama --tp 2 4 --set attention_bias=true   a plan of transformers, on random weights
  nnscaler verify-external hf:qwen3 --tp 2 --sweep-flags         and with each flag that changes its parameters or paths
  nnscaler verify-external hf:all --tp 2 --output-format jsonl   every model with a plan
  nnscaler verify-external --torchrun 'train.py --steps 2' --ranks 2     a script, against the same script on one rank

a check file has nothing of nnscaler in it (docs/verify-external.md):
  def model(): ...                    the plain eager module: what the program must equal
  def batch(): ...                    the batch of one step, whole: dim 0 of its tensors are the rows
  def parallelize(model, mesh): ...   yours, as it is: DTensor, FSDP2, DDP, a pipeline schedule
  mesh = ("dp",)                      or {"dp": 2, "tp": 2}, or a function of the number of ranks
and, where needed: step(model, batch) -> loss, reference_step, optimizer(model), max_norm, clip(model, max_norm),
data_axes, names, reference.

what is compared with the plain model: the loss, every gradient on every rank, the norm of gradients, parameters and
buffers after the optimizer's steps, and copies; in float64, or in the dtypes that are asked for. Parameters are
disturbed at random first. Nothing is downloaded, and no GPU is needed.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="TARGET",
        help="check.py, check.py::parallelize, package.module:parallelize; hf:TYPE, a model_type of the installed "
        "transformers or a folder with a configuration; hf:all",
    )
    parser.add_argument(
        "--torchrun",
        dest="script",
        metavar="WORDS",
        help="instead of TARGET: start this script once per rank, as torchrun does; what it must equal is the same "
        "script on one rank",
    )
    from verify.external.request import REFERENCES

    parser.add_argument(
        "--reference",
        choices=REFERENCES,
        default="whole",
        help="what a script must equal: whole (default), itself on one rank with the rows of all ranks; parts, or the "
        "mean over the data parts, each by itself: losses over unequal counts and statistics of a rank's rows are then "
        "taken to be meant",
    )
    _add_program(parser.add_argument_group("program"))
    _add_library(parser.add_argument_group("plans of transformers (hf:TYPE)"))
    _add_run(parser.add_argument_group("run"))
    add_option(parser)
    add_report_options(parser)


def _add_program(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ranks", type=positive, metavar="N", help="how many ranks (default: what the mesh says, else 2)"
    )
    group.add_argument(
        "--mesh", metavar="AXES", help="axes and sizes, outermost first, instead of the file's: dp=2,tp=2"
    )


def _add_library(group: argparse._ArgumentGroup) -> None:
    for name, of in (("tp", "tensor"), ("ep", "expert"), ("fsdp", "fully sharded data"), ("pp", "pipeline")):
        help = f"ranks of {of} parallelism; several: one run for each"
        group.add_argument(f"--{name}", type=positive, nargs="+", action="extend", default=[], metavar="N", help=help)
    group.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the configuration, such as attention_bias=true; may be given several times",
    )
    group.add_argument(
        "--sweep-flags",
        action="store_true",
        help="also with each flag of the configuration that adds or removes parameters, or takes another path",
    )
    group.add_argument(
        "--emit-script", metavar="PATH", help="write a short script that shows the first difference without nnscaler"
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    from nnscaler.ir.mixed_precision_dtypes import FLOATS
    from verify.external.request import EXECUTORS, TIMEOUT

    group.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="simulator",
        help="simulator (default): a thread per rank in one process; gloo: real processes, for programs that keep "
        "groups where threads share them; both: they must agree",
    )
    group.add_argument("--steps", type=positive, default=2, metavar="K", help="steps of the optimizer (default: 2)")
    group.add_argument("--seed", type=seed_number, default=0, metavar="S", help="of parameters and batch (default: 0)")
    group.add_argument(
        "--dtype",
        dest="dtypes",
        nargs="+",
        action="extend",
        choices=FLOATS,
        default=[],
        metavar="DTYPE",
        help=f"{', '.join(FLOATS)}; several: one run in each (default: float64, which compares up to rounding; the "
        "others up to the model's own rounding noise)",
    )
    group.add_argument(
        "--checkpoint",
        action="store_true",
        help="also save (by torch.distributed.checkpoint, and save_pretrained), load under another mesh, and compare",
    )
    group.add_argument(
        "--level",
        choices=("all", "static", "run"),
        default="all",
        help="static: trace and prove, run nothing; run: the other way round (default: all)",
    )
    help = f"seconds that one program may run (default: {TIMEOUT:g})"
    group.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="S", help=help)


def run(options: argparse.Namespace) -> int:
    """Verify, print the reports, and return the exit code of the worst."""
    started = time.perf_counter()
    reports = verify(external_request(options), options.console)
    code = show(reports, options, time.perf_counter() - started)
    if options.comm_profile is not None:
        _show_profiles(reports, options)
    return code


def _show_profiles(reports: list[Report], options: argparse.Namespace) -> None:
    """Print what each program communicates in a step; warn where that is not known, or does not fit in one file."""
    console: Console = options.console
    measured = [report for report in reports if report.attachments.communication_profile is not None]
    if len(measured) < len(reports):
        console.warning(f"{len(reports) - len(measured)} of {len(reports)} reports have no communication profile")
    for number, report in enumerate(measured):
        if number and options.comm_profile.path is not None:
            console.warning(f"{options.comm_profile.path} has the profile of {measured[0].subject} alone")
            return
        if len(measured) > 1 and options.comm_profile.path is None:
            console.result(f"\n{report.subject} {report.setting}")
        show_profile(report.attachments.communication_profile, options.comm_profile, console)


def external_request(options: argparse.Namespace) -> ExternalRequest:
    """Return what the options say is to be verified."""
    from verify.external.request import ExternalRequest

    return request_of(ExternalRequest, options, dtypes=options.dtypes or ("float64",))


def verify(request: ExternalRequest, console: Console) -> list[Report]:
    """Verify what the request says, and tell the console. Raises NnscalerError for what could not be run."""
    from verify.external.verify_request import verify_external_request

    return verify_external_request(request, run_context(console))


def show(reports: list[Report], options: argparse.Namespace, taken: float = 0.0) -> int:
    """Print the reports as asked, and return the exit code of the worst. `taken`: seconds; 0: the sum of theirs."""
    from nnscaler.cli.output.print_reports import print_reports
    from verify.results.verdict import merge

    print_reports(reports, options.output_format, options.console, taken)
    return merge(report.verdict for report in reports).exit_code
