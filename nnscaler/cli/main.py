"""The `nnscaler` command: parses arguments, runs one command, and turns what happened into an exit code.

Everything heavy is imported inside the commands, so that `--help` and usage errors answer at once. Nothing but a
verdict gives exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.cli.own_packages_shadowed import wrong_package
from nnscaler.cli.signals import tell_end

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

EXIT_CODES = """exit codes:
  0 verified   1 refuted: a counter-example exists   2 could not run (usage, model, plan)
  3 inconclusive, or nothing was checked   101 a bug of nnScaler   130 interrupted   143 terminated"""
EPILOG = f"""examples:
  nnscaler verify-plan model.py --ranks 8                       search a plan, compile, run 8 processes, compare
  nnscaler compile model.py --ranks 4 --plan dp=2,tp=2 --out program/
  torchrun --nproc-per-node 4 -m nnscaler.runtime.launch program/
  nnscaler train examples/gpt.toml --ranks=2                    train on data, with checkpoints
  nnscaler timeline model.py --plan dp=2,pp=2 --html step.html  when ranks compute, and when they communicate
  nnscaler verify-op my_ops.py::my_op                           is the annotation true?
  nnscaler verify-external check.py --ranks 4                   does your own FSDP2 or DTensor code equal the model?
  nnscaler gate                                                 all that pyproject.toml lists
  nnscaler reproduce nns1:...                                   replay a finding
  nnscaler explain gradient_differs                             what a finding's code means, and what to do
  nnscaler list plans

{EXIT_CODES}"""
Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Never raises."""
    console: Console | None = None
    try:
        problem = wrong_package()
        if problem is not None:
            print(f"error: {problem}", file=sys.stderr)
            return ExitCode.COULD_NOT_RUN
        from nnscaler.cli.options import command_defaults
        from nnscaler.cli.output.console import Console

        try:
            words = sys.argv[1:] if argv is None else argv
            options = build_parser(command_defaults(words, os.environ)).parse_args(words)
        except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after a usage error
            said = Console().said()  # argparse leaves its text to the end of the process
            return stop.code if isinstance(stop.code, int) and said else ExitCode.COULD_NOT_RUN
        from nnscaler.cli.options import verbosity
        from nnscaler.cli.output.print_reports import check_outputs

        console = Console(options.color, verbosity(options))
        options.console = console
        console.check()
        check_outputs(options, os.environ)
        command: Command = options.command
        with contextlib.redirect_stdout(sys.stderr):  # the model may print; results are the console's
            code = int(command(options))
        return code if console.said() else ExitCode.COULD_NOT_RUN
    except KeyboardInterrupt as stopped:
        return tell_end(stopped)
    except SystemExit as stop:
        from nnscaler.errors import exit_call

        print(f"error: the model's code stopped the process: {exit_call(stop)}", file=sys.stderr)
        return ExitCode.COULD_NOT_RUN
    except BaseException as error:
        return _explain(error, console)


def build_parser(defaults: Mapping[str, object] | None = None) -> argparse.ArgumentParser:
    """Build the parser with all its commands. `options.command` is the function that runs the chosen one.

    `defaults`: of the commands of `COMMANDS`, as the project sets them; each takes those that it has.
    """
    from nnscaler.cli.commands import (
        checkpoint,
        compile_command,
        explain_finding_code,
        gate,
        list_things,
        plan,
        profile,
        reproduce,
        schedule,
        self_test_by_planted_errors,
        timeline,
        train,
        verify_external,
        verify_op,
        verify_plan,
    )
    from nnscaler.cli.options import COMMANDS

    parser = argparse.ArgumentParser(
        prog="nnscaler",
        description="Turn a PyTorch model into a program for many ranks, and check that the program equals the model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    no_option = argparse.SUPPRESS  # of what is run: tokens say nothing of it
    said = "show program's version number and exit"
    parser.add_argument("--version", action=_Version, nargs=0, dest=no_option, default=no_option, help=said)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        verify_plan,
        compile_command,
        train,
        plan,
        schedule,
        timeline,
        profile,
        checkpoint,
        verify_op,
        verify_external,
        gate,
        explain_finding_code,
        reproduce,
        self_test_by_planted_errors,
        list_things,
    ):
        _add_command(commands, command)
    for name in COMMANDS:
        commands.choices[name].set_defaults(**(defaults or {}))
    return parser


def _add_command(commands: Any, command: Any) -> None:
    """Add a command, which is a module: `NAME`, `HELP`, `DESCRIPTION`, `EPILOG`, `add_options`, and `run` where its
    actions have none."""
    parser = commands.add_parser(
        command.NAME,
        help=command.HELP,
        description=command.DESCRIPTION,
        epilog=f"{command.EPILOG}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=command.NAME != "train",  # which tells of the settings in its file, too
    )
    parser.set_defaults(command=getattr(command, "run", None))
    command.add_options(parser)


class _Version(argparse.Action):
    """Prints the version, which only this asks for: to read it takes a twentieth of a short command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"nnscaler {version('nnscaler')}")
        except PackageNotFoundError:
            print("nnscaler (not installed)")
        parser.exit()


def _explain(error: BaseException, console: Console | None) -> int:
    """Print the message that the user reads instead of our traceback, and return the exit code."""
    write = console.error if console is not None else lambda text: print(text, file=sys.stderr)
    from nnscaler.atomic_writes import machine_error
    from nnscaler.errors import NnscalerError

    told = error if isinstance(error, NnscalerError) else machine_error(error)
    if told is not None:
        write(f"error: {told}")
        return ExitCode.COULD_NOT_RUN
    from nnscaler.cli.output.exit_codes import crash_report

    write(crash_report(error))
    return ExitCode.INTERNAL_ERROR
