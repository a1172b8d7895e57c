"""`nnscaler verify-op`: verify an operator's annotation."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import check_temporary
from nnscaler.cli.options import add_report_options, positive, seconds, seed_number

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.evidence.verify_op_options import OpOptions
    from verify.operators.run.job import Job
    from verify.operators.run.verify_many import JobResult, PoolSettings

NAME = "verify-op"
HELP = "check an operator's annotation against the operator"
DESCRIPTION = "Run an operator whole and split as its annotation says, and compare."
EPILOG = """examples:
  nnscaler verify-op my_ops.py::my_op                 an operator of a file; imports the file
  nnscaler verify-op my_ops.py                        every operator that the file registers
  nnscaler verify-op my_package.ops:my_op             an operator of a package
  nnscaler verify-op --module my_package.ops          every operator that the module and its submodules register
  nnscaler verify-op aten.gelu my_lib::my_op          operators of torch, and of torch.library
  nnscaler verify-op 'aten.*norm*'                    every registered name that matches
  nnscaler verify-op torch.optim.SGD --with momentum=0.9,nesterov=True   the step of an optimizer
  nnscaler verify-op my_optimizers.py::Lion           of your own
  nnscaler verify-op --all                            every built-in operator
  nnscaler verify-op                                  what [tool.nnscaler.verify-op] of pyproject.toml names
  nnscaler verify-op my_ops.py::f --annotation 'm k+, k+ n -> m n'       a function that is not registered
  nnscaler verify-op my_ops.py::f --sample-inputs inputs_of_f --suggest  which annotation would hold?
  nnscaler verify-op my_ops.py --emit-test test_my_ops.py                what is wrong, as tests of your own
  nnscaler verify-op --output-format junit=ops.xml --output-format json=ops.json

in pyproject.toml:
  [tool.nnscaler.verify-op]
  modules = ["my_package.ops"]
  files = ["kernels/attention.py"]

each identifier is split in 2, 3 and 4 parts, alone and with another one; outputs and input gradients of the shards, put
together, must equal those of the whole operator. What passes is proved where it can be. Operators run in processes of
their own: one that aborts is a finding. Passes are kept in ~/.cache/nnscaler, or where `cache` in [tool.nnscaler] says,
until anything that they depend on changes.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    _add_what(parser)
    _add_how(parser.add_argument_group("verification"))
    group = parser.add_argument_group("run")
    group.add_argument("--jobs", type=positive, metavar="N", help="child processes (default: one per processor)")
    group.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="seconds for one operator (default: 60)"
    )
    group.add_argument("--fail-fast", action="store_true", help="stop at the first thing that is not verified")
    group.add_argument("--no-cache", action="store_true", help="run everything, and keep nothing; for release gates")
    group.add_argument("--emit-test", type=Path, metavar="FILE", help="write a pytest test for every finding")
    add_report_options(parser)


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="*",
        metavar="TARGET",
        help="file.py::function, file.py, package.module:function, a registered name or a pattern of names",
    )
    parser.add_argument("--all", action="store_true", help="every built-in operator")
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="every operator that a module, or a package with its submodules, registers; may be given several times",
    )


def _add_how(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--annotation", metavar="TEXT", help="check this annotation instead of the registered one")
    group.add_argument(
        "--sample-inputs", metavar="NAME", help="a function of the operator's file that gives arguments to call it with"
    )
    group.add_argument(
        "--with",
        dest="arguments",
        metavar="NAME=VALUE,...",
        help="hyper-parameters of an optimizer; also TARGET(NAME=VALUE, ...)",
    )
    group.add_argument("--seed", type=seed_number, default=0, metavar="S", help="of the random inputs (default: 0)")
    group.add_argument("--cases", type=positive, metavar="N", help="at most so many cases per claim (default: all)")
    group.add_argument(
        "--profile",
        choices=("standard", "deep"),
        default="standard",
        help="deep: 500 more cases per operator, drawn and shrunk by hypothesis (pip install hypothesis)",
    )
    group.add_argument("--no-prove", action="store_true", help="test only")
    group.add_argument(
        "--suggest", action="store_true", help="say which annotation holds: for a function without one, or a wider one"
    )


def run(options: argparse.Namespace) -> int:
    """Verify, print the reports, and return the exit code of the worst."""
    from verify.evidence.verify_op_options import OpOptions
    from verify.operators.run.targets import find_jobs

    console: Console = options.console
    check_temporary()
    started = time.perf_counter()
    asked = OpOptions(
        seed=options.seed,
        fail_fast=options.fail_fast,
        prove=not options.no_prove,
        suggest=options.suggest,
        timeout=options.timeout,
        cases=options.cases,
    )
    jobs = find_jobs(
        options.target,
        builtin=options.all,
        modules=options.module,
        annotation=options.annotation,
        sample_inputs=options.sample_inputs,
        arguments=options.arguments,
        suggest=options.suggest,
    )
    from verify.operators.run.verify_many import worst

    settings = _settings(options, console)
    results = sorted(_results(jobs, asked, settings, console), key=lambda result: result.index)
    if len(results) < len(jobs):
        console.warning(f"{len(jobs) - len(results)} of {len(jobs)} operators were not verified: --fail-fast")
    _print(results, options, time.perf_counter() - started)
    if options.emit_test is not None:
        _emit(results, options.emit_test, asked, console)
    return worst([result.report for result in results])


def _settings(options: argparse.Namespace, console: Console) -> PoolSettings:
    from verify.operators.run.cache import open_cache
    from verify.operators.run.fuzz_with_hypothesis import require_hypothesis, verify_deep
    from verify.operators.run.run_job import verify_job
    from verify.operators.run.verify_many import PoolSettings

    if options.profile == "deep":
        require_hypothesis()
    cache = None if options.no_cache else open_cache("verify_op")
    if cache is not None and cache.problem is not None:
        console.warning(cache.problem)
    return PoolSettings(
        workers=options.jobs,
        cache=cache,
        modules=tuple(options.module),
        verify=verify_deep if options.profile == "deep" else verify_job,
    )


def _results(jobs: list[Job], asked: OpOptions, settings: PoolSettings, console: Console) -> list[JobResult]:
    """Every result; each is told on stderr as it comes."""
    from nnscaler.cli.output.console import ProgressLine
    from verify.operators.run.verify_many import run_many

    found: list[JobResult] = []
    progress = ProgressLine(console, len(jobs), os.environ)
    with closing(run_many(jobs, asked, settings, progress.started)) as results, progress:
        for result in results:
            found.append(result)
            progress.done(result.job.spec.name, _line(result))
            if result.remark:
                console.detail(f"{result.job.spec.name} is {result.remark}")
    return found


def _line(result: JobResult) -> str:
    """`PASS aten.linear.default  PROVED (all sizes)  12 of 12 agree  0.2 s`."""
    report = result.report
    word = "PASS" if report.verdict.passes else "FAIL" if report.exit_code == 1 else "OPEN"
    how = "cached" if result.cached else f"{report.seconds:.1f} s"
    counts = f"{report.total - report.refuted} of {report.total} agree"
    return f"{word} {report.subject}  {report.verdict}  {counts}  {how}"


def _print(results: list[JobResult], options: argparse.Namespace, taken: float) -> None:
    from nnscaler.cli.output.print_reports import destinations, print_reports
    from verify.operators.run.verify_many import summary

    console: Console = options.console
    reports = [result.report for result in results]
    if len(reports) > 1 and "full" in destinations(options.output_format, os.environ).stdout:
        console.lines(summary(reports))
    print_reports(reports, options.output_format, console, taken)


def _emit(results: list[JobResult], file: Path, asked: OpOptions, console: Console) -> None:
    from verify.operators.run.replay import emit_tests

    written, problems = emit_tests([(result.job, result.report) for result in results], file, asked)
    for problem in problems:
        console.warning(problem)
    if written:
        console.progress(f"wrote {file}" if written == 1 else f"wrote {written} files {file.stem}_*{file.suffix}")
    elif not problems:
        console.progress(f"no finding, so {file} was not written")
