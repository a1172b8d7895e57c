"""`nnscaler self-test`: plant errors in operators, annotations and programs, and count how many the verification
finds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import check_folder, check_temporary
from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.results.styled_line import StyledLine

NAME = "self-test"
HELP = "check the checker: plant errors and count how many are found"
DESCRIPTION = "Plant errors in operators, annotations and programs, and count how many are found."
EPILOG = """examples:
  nnscaler self-test ops             verify-op against wrong annotations and wrong operators
  nnscaler self-test ops --quick     a part of it, in seconds
  nnscaler self-test plans           verify-plan against wrong programs
  nnscaler self-test plans --quick   a part of it, in a minute
  nnscaler self-test plans --model gpt --seed 7 --level L0
  nnscaler self-test plans --table-t thirty bugs of real systems
  nnscaler self-test train           verify-plan --train against wrong training runs
  nnscaler self-test external        verify-external against wrong programs in torch's own parallel styles
  nnscaler self-test soundness-ops --count 5000 --seed 1      random annotations: what passes must be true
  nnscaler self-test soundness-plans --count 20000 --seed 1   random edits: what is proved must be right

exit code 0: every required rate holds; 1: one does not.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    from nnscaler.cli.options import add_verbosity, seed_number

    parser.add_argument("what", choices=("ops", "plans", "train", "external", "soundness-ops", "soundness-plans"))
    parser.add_argument("--quick", action="store_true", help="a part of everything")
    plans = parser.add_argument_group("plans")
    plans.add_argument("--model", action="append", metavar="NAME", help="mutants of this example model (repeatable)")
    plans.add_argument("--seed", type=seed_number, default=0, help="chooses where mutants are planted (0)")
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


Found = tuple[bool, "list[StyledLine]"]  # whether it passes, and its tables


def run(options: argparse.Namespace) -> int:
    """Run the self-test, print its tables, and return 0 or 1. Raises NnscalerError for senseless options."""
    import torch

    check_temporary()
    torch.set_num_threads(1)
    tests = {
        "ops": _ops,
        "soundness-ops": _soundness_ops,
        "plans": _plans,
        "soundness-plans": _soundness_plans,
        "train": _train,
        "external": _external,
    }
    good, lines = tests[options.what](options)
    options.console.lines(lines)
    return int(ExitCode.VERIFIED if good else ExitCode.REFUTED)


def _ops(options: argparse.Namespace) -> Found:
    from verify.self_test.operators.run_self_test import run_self_test, self_test_lines

    found = run_self_test(_EveryTwoSeconds(options.console), options.quick)
    return found.good, self_test_lines(found)


def _soundness_ops(options: argparse.Namespace) -> Found:
    from verify.self_test.operators.annotation_fuzz import COUNT, run_soundness, soundness_lines

    count = COUNT if options.count is None else options.count
    if count < 1:
        raise NnscalerError("usage", "--count is at least 1")
    found = run_soundness(_EveryTwoSeconds(options.console), count, options.seed)
    return found.good, soundness_lines(found)


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


def _plans(options: argparse.Namespace) -> Found:
    from verify.self_test.programs.judge_mutants_and_known_bugs import LEVELS, MutantSelection, run_table
    from verify.self_test.programs.right_programs import NAMES
    from verify.self_test.programs.run_and_tally import plans_lines, run_plans_self_test, table_lines

    if options.each < 1 or options.processes < 1:
        raise NnscalerError("usage", "--each and --processes are at least 1")
    if options.table_t:
        table = run_table(options.console.progress)
        return table.good, table_lines(table)
    models = _known(options.model, NAMES, "no mutants are made of")
    wanted = MutantSelection(
        quick=options.quick or models != NAMES,
        seed=options.seed,
        levels=tuple(level for level in LEVELS if not options.level or level in options.level),
        models=models,
        each=options.each,
        processes=options.processes,
    )
    found = run_plans_self_test(options.console.progress, wanted)
    return found.good, plans_lines(found, verbose=bool(options.verbose))


def _train(options: argparse.Namespace) -> Found:
    from verify.self_test.training.mutants import ROWS
    from verify.self_test.training.run import run_table, table_lines

    if options.processes < 1:
        raise NnscalerError("usage", "--processes is at least 1")
    table = run_table(options.console.progress, ROWS[::8] if options.quick else ROWS, options.processes)
    return table.good, table_lines(table, verbose=bool(options.verbose))


def _external(options: argparse.Namespace) -> Found:
    from verify.self_test.external.run import ROWS, run_table, table_lines

    if options.processes < 1:
        raise NnscalerError("usage", "--processes is at least 1")
    table = run_table(options.console.progress, ROWS[::12] if options.quick else ROWS, options.processes)
    return table.good, table_lines(table, verbose=bool(options.verbose))


def _soundness_plans(options: argparse.Namespace) -> Found:
    from verify.self_test.programs.right_programs import TINY
    from verify.self_test.programs.soundness.run import COUNT, run_soundness, soundness_lines

    names = _known(options.model, tuple(TINY), "no programs are made of")
    count = COUNT if options.count is None else options.count
    if count < 1 or options.processes < 1:
        raise NnscalerError("usage", "--count and --processes are at least 1")
    check_folder(options.out)
    found = run_soundness(
        options.console.progress,
        count=count,
        seed=options.seed,
        names=names,
        processes=options.processes,
        out=options.out,
    )
    return found.good, soundness_lines(found)


def _known(wanted: list[str] | None, names: tuple[str, ...], problem: str) -> tuple[str, ...]:
    """Return the models that are wanted. Raises NnscalerError for one that there is not."""
    for name in wanted or ():
        if name not in names:
            raise NnscalerError("usage", f"{problem} {name!r}", help=f"models: {', '.join(names)}")
    return tuple(wanted or names)
