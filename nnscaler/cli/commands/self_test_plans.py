"""`nnscaler self-test plans` and `nnscaler self-test soundness-plans`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError
from nnscaler.files import check_folder

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
    from verify.self_test.programs.table_t.run import run_table
    from verify.self_test.programs.text import table_lines

    console: Console = options.console
    found = run_table(console.progress)
    console.lines(table_lines(found))
    return found.good


def _mutants(options: argparse.Namespace) -> bool:
    from verify.self_test.programs.plans import NAMES, run_plans_self_test
    from verify.self_test.programs.run import LEVELS
    from verify.self_test.programs.text import plans_lines

    console: Console = options.console
    models = tuple(options.model or NAMES)
    if unknown := [name for name in models if name not in NAMES]:
        raise NnscalerError("usage", f"no mutants are made of {unknown[0]!r}", help=f"models: {', '.join(NAMES)}")
    found = run_plans_self_test(
        console.progress,
        quick=options.quick or models != NAMES,
        seed=options.seed,
        levels=tuple(level for level in LEVELS if not options.level or level in options.level),
        models=models,
        each=options.each,
        processes=options.processes,
    )
    console.lines(plans_lines(found, verbose=bool(options.verbose)))
    return found.good


def run_soundness_plans(options: argparse.Namespace) -> int:
    """Edits programs at random, and returns 1 where one is proved and wrong. Raises NnscalerError for senseless
    options."""
    from verify.self_test.programs.soundness.run import COUNT, run_soundness, soundness_lines
    from verify.self_test.programs.soundness.tiny_models import TINY

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
