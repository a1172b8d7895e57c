"""`nnscaler explain`: explain the code of a finding, with an example, and what to do."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_verbosity
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

NAME = "explain"
HELP = "say what the code of a finding means, and what to do"
DESCRIPTION = "Explain the code of a finding."
EPILOG = """examples:
  nnscaler explain                       every code, with the sentence that says what it means
  nnscaler explain gradient_differs      what it means, an example, what to do
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("code", nargs="?", metavar="CODE", help="such as gradient_differs; without it all are listed")
    add_verbosity(parser.add_argument_group("output"))


def run(options: argparse.Namespace) -> int:
    """Print the page of a code, or the list of all."""
    from verify.results.finding_codes import CODES, page

    console: Console = options.console
    if options.code is None:
        width = max(map(len, CODES))
        for code, sentence in CODES.items():
            console.result(f"{code:<{width}}  {sentence}")
        return 0
    code = options.code.strip().strip("`").replace("-", "_").lower()
    if code not in CODES:
        near = get_close_matches(code, CODES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`nnscaler explain` lists every code"
        raise NnscalerError("unknown_code", f"no finding has the code {options.code!r}", help=hint)
    console.markdown(page(code))
    return 0
