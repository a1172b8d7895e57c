"""`nnscaler gate`: everything that a project wants to be verified before it is deployed."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.options import add_report_options, seconds
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.console import Console
    from verify.gate.child import ItemResult
    from verify.gate.items import GateSettings, Item
    from verify.gate.run import GateResult

EPILOG = """examples:
  nnscaler gate                                        all that [tool.nnscaler.gate] lists
  nnscaler gate --budget 120 --only gpt.py             two minutes, items that have gpt.py in their name
  nnscaler gate --output-format sarif=gate.sarif --output-format junit=gate.xml --html gate.html
  nnscaler gate --list                                 what would run
  nnscaler gate --update-baseline --owner ann --expires 2027-01-31

in pyproject.toml:
  [tool.nnscaler.gate]
  budget = "10m"
  ops = ["my_ops.py"]
  baseline = "nnscaler-baseline.toml"

  [[tool.nnscaler.gate.plans]]
  model = "gpt.py"
  ranks = 8
  plan = ["dp=2,tp=2,pp=2", "dp=8"]

every item runs in a process of its own. What failed last time runs first. What does not fit into the budget, dies or
hangs is not a pass. The table at the end is Markdown, to paste into a review.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "gate",
        help="verify the plans and operators that the project lists",
        description="Verify everything that [tool.nnscaler.gate] of pyproject.toml lists.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="this file, not the nearest pyproject.toml")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="items with this in their name")
    parser.add_argument("--budget", type=seconds, metavar="S", help="seconds for all items together")
    parser.add_argument("--seed", type=int, metavar="S", help="of parameters, batches and inputs (default: 0)")
    parser.add_argument("--list", action="store_true", help="show the items and run none")
    group = parser.add_argument_group("baseline")
    group.add_argument("--update-baseline", action="store_true", help="write what is found now as known")
    group.add_argument("--owner", metavar="NAME", help="who answers for new entries")
    group.add_argument("--expires", type=date.fromisoformat, metavar="YYYY-MM-DD", help="until when they are known")
    add_report_options(parser)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Runs the items, prints the summary, writes the reports, and returns the exit code of the worst."""
    from nnscaler.config import find_settings, read_settings
    from verify.gate.baseline import read_baseline
    from verify.gate.items import read_gate, select
    from verify.gate.run import run_gate

    console: Console = options.console
    file = options.config or find_settings()
    if file is None:
        raise NnscalerError("nothing_named", "there is no pyproject.toml here or above", help="--config names a file")
    gate = read_gate(read_settings(file), options.budget, options.seed)
    _check_update(options, gate)
    items = select(gate.items, options.only)
    if options.list:
        _show(console, "\n".join(_listed(item) for item in items))
        return 0
    known = read_baseline(gate.baseline)
    console.progress(f"gate         {len(items)} items of {file}")
    result = run_gate(gate, items, known, lambda number, count, r: _tell(console, number, count, r))
    _print(options, gate, result)
    if options.update_baseline:
        return _update(options, gate, result)
    return result.exit_code


def _check_update(options: argparse.Namespace, gate: GateSettings) -> None:
    if not options.update_baseline:
        return
    if gate.baseline is None:
        raise NnscalerError("usage", "the gate has no baseline", help='baseline = "nnscaler-baseline.toml"')
    if options.owner is None or options.expires is None:
        raise NnscalerError("usage", "--update-baseline needs --owner and --expires")
    if options.expires < date.today():
        raise NnscalerError("usage", f"--expires {options.expires} is in the past")
    if options.only:
        raise NnscalerError("usage", "--update-baseline is about all items, and --only names some")


def _listed(item: Item) -> str:
    return f"{item.name}\n    nnscaler {' '.join(item.arguments)}"


def _tell(console: Console, number: int, count: int, result: ItemResult) -> None:
    word = {0: "PASS", 1: "FAIL", 3: "OPEN"}.get(result.exit_code, "ERROR")
    console.progress(f"{word:<5} {number} of {count}  {result.item.name}  {result.seconds:.1f} s")


def _print(options: argparse.Namespace, gate: GateSettings, result: GateResult) -> None:
    """The summary on stdout, in place of the reports in full; every format that was asked for as well."""
    from nnscaler.cli.show import print_reports
    from verify.environment import environment
    from verify.gate.summary import markdown
    from verify.report_formats.line import plain_lines

    lines = plain_lines(markdown(result, environment(), gate.seed))
    print_reports(result.reports, options.output_format, options.console, result.seconds, lines)


def _show(console: Console, text: str) -> None:
    from verify.report_formats.line import plain_lines

    console.lines(plain_lines(text))


def _update(options: argparse.Namespace, gate: GateSettings, result: GateResult) -> int:
    """Writes the baseline; what could not be run has no findings to be known."""
    from verify.gate.baseline import baseline_text, read_baseline

    console: Console = options.console
    assert gate.baseline is not None
    if result.exit_code in (2, 101, 130):
        console.warning(f"{gate.baseline} was not written: items could not be run")
        return result.exit_code
    found = [(j.result.item.name, f) for j in result.items for f in (*j.new, *(f for f, _ in j.known))]
    text = baseline_text(found, read_baseline(gate.baseline), options.owner, options.expires)
    gate.baseline.write_text(text, encoding="utf-8")
    console.progress(f"wrote {gate.baseline}: {len(found)} known")
    return 0
