"""`nnscaler reproduce`: replays the case of a finding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_report_options, seconds

if TYPE_CHECKING:
    from nnscaler.cli.console import Console

EPILOG = """examples:
  nnscaler reproduce nns1:eNo1jkEOwiAQRe8...           run exactly what a finding of verify-op ran
  nnscaler reproduce nns1:eNo1jkEOwiAQRe8... --emit-test test_it.py

a token names the operator, its annotation, the inputs and the split, and the version of nnscaler that found them;
another version refuses it. Run it in the folder in which it was found: the operator's file is named relative to that.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "reproduce",
        help="replay the case of a finding",
        description="Run the one case that a finding was about: is it still wrong?",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("token", metavar="TOKEN", help="the word that starts with nns1: in a finding's last line")
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="S", help="seconds (default: 60)")
    parser.add_argument("--emit-test", type=Path, metavar="FILE", help="write the case as a pytest test")
    add_report_options(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Replays, prints the report, and returns its exit code: 1 if it is still wrong, 0 if it is not."""
    from nnscaler.cli.show import print_report
    from verify.op_checks.options import OpOptions
    from verify.op_run.replay import emit_tests, find_job, replay
    from verify.op_run.token import decode

    console: Console = options.console
    token = decode(options.token)
    report = replay(token, options.timeout)
    print_report(report, options.output_format, console)
    if options.emit_test is not None:
        asked = OpOptions(seed=token.seed, timeout=options.timeout)
        written, problems = emit_tests([(find_job(token), report)], options.emit_test, asked)
        for problem in problems:
            console.warning(problem)
        console.progress(f"wrote {options.emit_test}" if written else f"{options.emit_test} was not written")
    return report.exit_code
