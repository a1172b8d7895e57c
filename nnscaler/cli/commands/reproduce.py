"""`nnscaler reproduce`: replay the case of a finding."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnscaler.atomic_writes import check_temporary
from nnscaler.cli.options import add_report_options, seconds
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.results.request_tokens import RequestWords

PLAN_PREFIX, EXTERNAL_PREFIX = "nns2:", "nns3:"
NAME = "reproduce"
HELP = "replay the case of a finding"
DESCRIPTION = "Run the one case that a finding was about: is it still wrong?"
EPILOG = """examples:
  nnscaler reproduce nns1:eNo1jkEOwiAQRe8...           run exactly what a finding of verify-op ran
  nnscaler reproduce nns1:eNo1jkEOwiAQRe8... --emit-test test_it.py
  nnscaler reproduce nns2:eNpVkMtuwyAQRfd8... --html it.html    verify a plan again as verify-plan did
  nnscaler reproduce nns3:eNpNj8FqwzAQRH9F...           verify a program again as verify-external did

a token of verify-op (nns1:) names the operator, its annotation, the inputs and the split; one of verify-plan (nns2:)
the model's file and its digest, the plan, and every option that decides what is run; one of verify-external (nns3:) the
check file, script or model and its digest, and those options. All name the version of nnscaler that made them, and
another version refuses them. Run it in the folder in which it was found: files are named relative to that. A file that
was changed since is replayed as it is now, with a warning.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("token", metavar="TOKEN", help="the word that starts with nns1:, nns2: or nns3: in a finding")
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="seconds (default: 60 for an operator, else as before)"
    )
    parser.add_argument("--emit-test", type=Path, metavar="FILE", help="write the case of an operator as a pytest test")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Replays, prints the report, and returns its exit code: 1 if it is still wrong, 0 if it is not."""
    from nnscaler.cli.output.print_reports import print_report
    from verify.operators.run.reproduce_token import decode

    console: Console = options.console
    check_temporary()
    for prefix, kind, replay_it in (
        (PLAN_PREFIX, "plan", _replay_plan),
        (EXTERNAL_PREFIX, "program", _replay_external),
    ):
        if options.token.strip().startswith(prefix):
            if options.emit_test is not None:
                raise NnscalerError("usage", f"--emit-test writes tests of operators: this token is of a {kind}")
            return replay_it(options)
    timeout = options.timeout or 60.0
    token = decode(options.token)
    from verify.evidence.verify_op_options import OpOptions
    from verify.operators.run.replay import emit_tests, find_job, replay

    report = replay(token, timeout)
    print_report(report, options.output_format, console)
    if options.emit_test is not None:
        asked = OpOptions(seed=token.seed, timeout=timeout)
        written, problems = emit_tests([(find_job(token), report)], options.emit_test, asked)
        for problem in problems:
            console.warning(problem)
        console.progress(f"wrote {options.emit_test}" if written else f"{options.emit_test} was not written")
    return report.exit_code


def _replay_plan(options: argparse.Namespace) -> int:
    """Verifies what a token says and shows it as asked; the exit code of the verdict."""
    from nnscaler.cli.commands import verify_plan
    from nnscaler.cli.output.print_reports import print_report
    from verify.programs.request import WORDS

    report = verify_plan.verify(_asked(options, WORDS), options.console)
    print_report(report, options.output_format, options.console)
    return report.exit_code


def _replay_external(options: argparse.Namespace) -> int:
    """Verify what a token of verify-external says, as `_replay_plan` does that of a plan."""
    from nnscaler.cli.commands import verify_external
    from verify.external.request import WORDS

    request = _asked(options, WORDS)
    return verify_external.show(verify_external.verify(request, options.console), options)


def _asked(options: argparse.Namespace, words: RequestWords[Any]) -> Any:
    """Return the request of a token.

    Raises NnscalerError `bad_token`, and `no_such_file` where a file of the token is gone. A file that was changed, and
    another torch, are warned of: the question may be whether a correction helped.
    """
    token = words.decode(options.token)
    for change in token.changes():
        options.console.warning(change)
    request = words.request_of(token)
    return request if options.timeout is None else replace(request, timeout=options.timeout)
