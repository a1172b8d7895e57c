"""`nnscaler self-test`: does the verification find what is wrong?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError
from nnscaler.files import check_folder, check_temporary

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

EPILOG = """examples:
  nnscaler self-test ops             verify-op against wrong annotations and wrong operators
  nnscaler self-test ops --quick     a part of it, in seconds
  nnscaler self-test plans           verify-plan against wrong programs
  nnscaler self-test plans --quick   a part of it, in a minute
  nnscaler self-test plans --model gpt --seed 7 --level L0
  nnscaler self-test plans --table-t thirty bugs of real systems
  nnscaler self-test soundness-ops --count 5000 --seed 1      random annotations: what passes must be true
  nnscaler self-test soundness-plans --count 20000 --seed 1   random edits: what is proved must be right

exit code 0: every required rate holds; 1: one does not.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Add the command to the parser."""
    from nnscaler.cli.options import add_verbosity

    parser = commands.add_parser(
        "self-test",
        help="check the checker: plant errors and count how many are found",
        description="Plant errors in operators, annotations and programs, and count how many are found.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("ops", "plans", "soundness-ops", "soundness-plans"))
    parser.add_argument("--quick", action="store_true", help="a part of everything")
    plans = parser.add_argument_group("plans")
    plans.add_argument("--model", action="append", metavar="NAME", help="mutants of this example model (repeatable)")
    plans.add_argument("--seed", type=int, default=0, help="chooses where mutants are planted (0)")
    plans.add_argument("--level", action="append", choices=("L0", "L2"), help="ask this level only (repeatable)")
    plans.add_argument("--each", type=int, default=1, metavar="N", help="mutants of each kind in each program (1)")
    plans.add_argument("--processes", type=int, default=2, metavar="N", help="processes to run on (2)")
    plans.add_argument("--table-t", action="store_true", help="thirty bugs of real systems instead")
    soundness = parser.add_argument_group("soundness")
    soundness.add_argument(
        "--count", type=int, metavar="N", help="how many random annotations or edits (ops: 5000, plans: 20000)"
    )
    soundness.add_argument(
        "--out", type=Path, default=Path("soundness"), metavar="DIR", help="where violations are saved (soundness/)"
    )
    add_verbosity(parser.add_argument_group("output"))
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run the self-test, print its tables, and return 0 or 1."""
    check_temporary()
    if options.what == "ops":
        return _run_ops(options)
    if options.what == "soundness-ops":
        return _run_soundness_ops(options)
    return run_plans(options) if options.what == "plans" else run_soundness_plans(options)


def _run_ops(options: argparse.Namespace) -> int:
    import torch

    from verify.self_test.operators.ops import run_self_test
    from verify.self_test.text import self_test_lines

    console: Console = options.console
    torch.set_num_threads(1)
    found = run_self_test(_EveryTwoSeconds(console), options.quick)
    console.lines(self_test_lines(found))
    return int(ExitCode.VERIFIED if found.good else ExitCode.REFUTED)


def _run_soundness_ops(options: argparse.Namespace) -> int:
    import torch

    from nnscaler.errors import NnscalerError
    from verify.self_test.operators.soundness_ops import COUNT, run_soundness, soundness_lines

    console: Console = options.console
    count = COUNT if options.count is None else options.count
    if count < 1:
        raise NnscalerError("usage", "--count is at least 1")
    torch.set_num_threads(1)
    found = run_soundness(_EveryTwoSeconds(console), count, options.seed)
    console.lines(soundness_lines(found))
    return int(ExitCode.VERIFIED if found.good else ExitCode.REFUTED)


class _EveryTwoSeconds:
    """One line of progress every two seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.said = 0.0

    def __call__(self, what: str) -> None:
        import time

        now = time.perf_counter()
        if now - self.said >= 2.0 or what.startswith("without "):
            self.said = now
            self.console.progress(what)


# `nnscaler self-test plans` and `nnscaler self-test soundness-plans`.

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console


def run_plans(options: argparse.Namespace) -> int:
    """Plant errors in programs, or print Table T, and return 0 or 1. Raises NnscalerError for senseless options."""
    import torch

    torch.set_num_threads(1)
    if options.each < 1 or options.processes < 1:
        raise NnscalerError("usage", "--each and --processes are at least 1")
    good = _table(options) if options.table_t else _mutants(options)
    return int(ExitCode.VERIFIED if good else ExitCode.REFUTED)


def _table(options: argparse.Namespace) -> bool:
    from verify.self_test.programs.known_bugs_run import run_table
    from verify.self_test.programs.text import table_lines

    console: Console = options.console
    found = run_table(console.progress)
    console.lines(table_lines(found))
    return found.good


def _mutants(options: argparse.Namespace) -> bool:
    from verify.self_test.programs.corpus import NAMES
    from verify.self_test.programs.run import LEVELS, Wanted
    from verify.self_test.programs.tally import run_plans_self_test
    from verify.self_test.programs.text import plans_lines

    console: Console = options.console
    models = tuple(options.model or NAMES)
    if unknown := [name for name in models if name not in NAMES]:
        raise NnscalerError("usage", f"no mutants are made of {unknown[0]!r}", help=f"models: {', '.join(NAMES)}")
    wanted = Wanted(
        quick=options.quick or models != NAMES,
        seed=options.seed,
        levels=tuple(level for level in LEVELS if not options.level or level in options.level),
        models=models,
        each=options.each,
        processes=options.processes,
    )
    found = run_plans_self_test(console.progress, wanted)
    console.lines(plans_lines(found, verbose=bool(options.verbose)))
    return found.good


def run_soundness_plans(options: argparse.Namespace) -> int:
    """Edits programs at random, and returns 1 where one is proved and wrong. Raises NnscalerError for senseless
    options."""
    from verify.self_test.programs.corpus import TINY
    from verify.self_test.programs.soundness.run import COUNT, run_soundness, soundness_lines

    console: Console = options.console
    names = tuple(options.model or TINY)
    count = COUNT if options.count is None else options.count
    if unknown := [name for name in names if name not in TINY]:
        raise NnscalerError("usage", f"no programs are made of {unknown[0]!r}", help=f"models: {', '.join(TINY)}")
    if count < 1 or options.processes < 1:
        raise NnscalerError("usage", "--count and --processes are at least 1")
    check_folder(options.out)
    found = run_soundness(
        console.progress, count=count, seed=options.seed, names=names, processes=options.processes, out=options.out
    )
    console.lines(soundness_lines(found))
    return int(ExitCode.VERIFIED if found.good else ExitCode.REFUTED)
