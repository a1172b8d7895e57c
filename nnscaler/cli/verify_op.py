"""`nnscaler verify-op`: is an operator's annotation true?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_report_options
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.console import Console

EPILOG = """examples:
  nnscaler verify-op my_ops.py::my_op                 an operator of a file; imports the file
  nnscaler verify-op my_ops.py                        every operator that the file registers
  nnscaler verify-op my_package.ops:my_op             an operator of an installed package
  nnscaler verify-op aten.gelu                        a built-in operator
  nnscaler verify-op my_ops.py::f --annotation 'm k+, k+ n -> m n'

every identifier is split in 2 and 3 parts; outputs and input gradients of the shards, put together, must equal those
of the whole operator.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "verify-op",
        help="check an operator's annotation against the operator",
        description="Run an operator whole and split as its annotation says, and compare.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "target", metavar="TARGET", help="file.py::function, file.py, package.module:function, or a registered name"
    )
    parser.add_argument("--annotation", metavar="TEXT", help="check this annotation instead of the registered one")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random inputs (default: 0)")
    add_report_options(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Verifies one operator, or all that a file registers, prints the report, and returns its exit code."""
    from nnscaler.cli.show import print_report
    from verify.operators import verify_file, verify_op

    console: Console = options.console
    if options.target.endswith(".py"):
        if options.annotation is not None:
            raise NnscalerError("usage", "--annotation is for one operator", help=f"{options.target}::function")
        report = verify_file(options.target, options.seed)
    else:
        report = verify_op(options.target, annotation=options.annotation, seed=options.seed)
    print_report(report, options.output_format, console)
    return report.exit_code
