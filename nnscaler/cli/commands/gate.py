"""`nnscaler gate`: verify everything that the project lists, with one exit code."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import check_temporary, check_writable
from nnscaler.cli.options import add_report_options, positive, seed_number
from nnscaler.cli.signals import exit_code_of
from nnscaler.errors import NnscalerError
from nnscaler.pyproject_settings import seconds_of

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.gate.accepted_findings_with_owners import KnownFinding
    from verify.gate.items import Item
    from verify.gate.outcome import GateOutcome, ItemResult
    from verify.gate.run_items_within_budget import Clock
    from verify.gate.settings import GateSettings

NAME = "gate"
HELP = "verify all models, plans and operators that pyproject.toml names"
DESCRIPTION = "Verify everything that [tool.nnscaler.gate] names, within a budget of time."
EPILOG = """examples:
  nnscaler gate                                        all that [tool.nnscaler.gate] of pyproject.toml names
  nnscaler gate --budget 120s                          what does not fit is INCONCLUSIVE, never a pass
  nnscaler gate --only 'gpt.py*' --list                show the items whose name matches, and run nothing
  nnscaler gate --output-format sarif=nnscaler.sarif --output-format junit=nnscaler.xml --output-format github
  nnscaler gate --update-baseline --owner me@example.org --expires 2027-01-31 --reason 'the fix is in review'

in pyproject.toml:
  [tool.nnscaler.gate]
  budget = "120s"
  baseline = "nnscaler-baseline.toml"                  known findings, each with owner and expiry date

  [[tool.nnscaler.gate.models]]
  model = "model.py"
  plans = [{ ranks = 4, plan = "dp=2,tp=2" }, { ranks = 2, plan = "pp=2", micro-batches = 4 }]

  [tool.nnscaler.gate.ops]
  files = ["my_ops.py"]

  [[tool.nnscaler.external]]                           as for verify-external
  target = "check.py"
  ranks = 4

every item runs in a process of its own, worst first: what failed last time, then the texts of all programs, then what
is quick. The summary on stdout is Markdown, for a review. Options go before NNSCALER_BUDGET, NNSCALER_BASELINE,
NNSCALER_SEED, NNSCALER_OP_TIMEOUT, NNSCALER_PLAN_TIMEOUT, NNSCALER_JOBS, NNSCALER_CACHE and NNSCALER_CONFIG, and those
before the file.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings (default: the nearest pyproject.toml)")
    parser.add_argument("--list", action="store_true", help="show the items, and run none")
    parser.add_argument("--show-config", action="store_true", help="show every setting and where it comes from")
    group = parser.add_argument_group("run")
    group.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="items whose name contains or matches this; may be given several times",
    )
    group.add_argument("--budget", type=duration, metavar="TIME", help="for all items together: 120, 120s, 2m, 1h30m")
    group.add_argument("--op-timeout", type=duration, metavar="TIME", help="for one operator (default: 60s)")
    group.add_argument(
        "--plan-timeout",
        type=duration,
        metavar="TIME",
        help="for one model and plan, or external program (default: 300s)",
    )
    group.add_argument("--seed", type=seed_number, metavar="S", help="of parameters, batches and inputs (default: 0)")
    group.add_argument("--jobs", type=positive, metavar="N", help="operators at a time (default: one per processor)")
    group.add_argument(
        "--no-cache",
        action="store_true",
        help="take no verdict and no lemma from before",
    )
    group = parser.add_argument_group("known findings")
    group.add_argument("--baseline", type=Path, metavar="FILE", help="known findings, each with owner and expiry date")
    group.add_argument("--update-baseline", action="store_true", help="write what is found to the baseline")
    group.add_argument("--owner", metavar="NAME", help="who answers for what --update-baseline adds")
    group.add_argument("--expires", type=day, metavar="DATE", help="until when: 2027-01-31")
    group.add_argument("--reason", metavar="TEXT", help="why it may stay until then")
    add_report_options(parser)


def duration(text: str) -> float:
    """Read a time in seconds: `120s`, `2m`, `1h30m` or `120`."""
    found = seconds_of(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 120s, 2m or 1h30m")
    return found


def day(text: str) -> date:
    """Read a date such as 2027-01-31."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date: 2027-01-31") from None


def run(options: argparse.Namespace) -> int:
    """Verify every item, print the summary, and return the exit code of the worst."""
    settings = gate_settings(options)
    console: Console = options.console
    if options.show_config:
        for setting in settings.values.values():
            console.result(f"{setting.name:<14} {_shown(setting.value):<28} {setting.source}")
        return 0
    check_temporary()
    entries = _entries(options, settings)
    from verify.gate.run_items_within_budget import Clock, find_operators, no_operator, preload, registered_later
    from verify.gate.settings import all_items

    clock = Clock(time.perf_counter(), settings.get("budget"))
    if settings.sources or not options.list:
        preload(bool(settings.external))
    results: dict[str, ItemResult] = {}
    stopped: KeyboardInterrupt | None = None
    every: list[Item] = [*settings.plans, *settings.external]
    chosen: list[Item] = []
    try:
        operators, failed = find_operators(settings.sources, settings.folder, clock)
        for result in failed:
            console.warning(result.report.findings[0].message)
        every = all_items(settings, operators)
        chosen = _chosen(every, failed, options.only)
        if options.list:
            for item in chosen:
                console.result(item.name)
            return 2 if failed else 0
        results = {} if options.only else {result.name: result for result in failed}
        _run(chosen, results, settings, clock, console)
        later = [op for op in registered_later(results.values(), every) if _asked(op, options.only)]
        every, chosen = [*every, *later], [*chosen, *later]
        if later:
            count = "an operator" if len(later) == 1 else f"{len(later)} operators"
            console.progress(f"{count} more, which models register when they are built or run")
            _run(later, results, settings, clock, console)
        source = settings.user_operators
        if source is not None and not _may_register_more(settings, results) and not _register(results):
            results[source.name] = no_operator(source)
    except KeyboardInterrupt as stop:
        stopped = stop
        chosen = chosen or every
    return _finish(options, settings, (every, chosen), results, entries, clock, exit_code_of(stopped) if stopped else 0)


def gate_settings(options: argparse.Namespace) -> GateSettings:
    """Return the settings, changed by the command line. Raises NnscalerError."""
    from verify.gate.settings import read_settings

    asked = {
        "budget": options.budget,
        "baseline": options.baseline,
        "seed": options.seed,
        "op-timeout": options.op_timeout,
        "plan-timeout": options.plan_timeout,
        "jobs": options.jobs,
        "cache": False if options.no_cache else None,
    }
    return read_settings(options.config, asked, os.environ)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else f"{value:g} s" if isinstance(value, float) else str(value)


def _entries(options: argparse.Namespace, settings: GateSettings) -> tuple[KnownFinding, ...]:
    """Read the known findings. Raises NnscalerError, `usage` among others, before anything runs."""
    from verify.gate.accepted_findings_with_owners import read_baseline

    file = settings.baseline
    if options.update_baseline:
        missing = [name for name in ("owner", "expires", "reason") if not getattr(options, name)]
        if missing:
            words = ", ".join(f"--{name}" for name in missing)
            raise NnscalerError(
                "usage", f"--update-baseline needs {words}: nothing is known without who and until when"
            )
        if options.expires < date.today():
            raise NnscalerError("usage", f"--expires {options.expires} is in the past")
        if file is None:
            help = '--baseline FILE, or baseline = "nnscaler-baseline.toml" in [tool.nnscaler.gate]'
            raise NnscalerError("usage", "--update-baseline does not know which file", help=help)
        check_writable(file)
    elif file is not None and not file.exists():
        console: Console = options.console
        given = "" if options.baseline is None else f" --baseline {quote(str(options.baseline))}"
        write = f"nnscaler gate{given} --update-baseline --owner NAME --expires YYYY-MM-DD --reason TEXT"
        name = os.path.relpath(file)
        console.warning(f"there is no baseline {name} yet, so no finding is known; to write it:\n  {write}")
    return read_baseline(file)


def _chosen(every: Sequence[Item], failed: Sequence[ItemResult], only: Sequence[str]) -> list[Item]:
    from verify.gate.items import check_names, select

    check_names(every)
    return select(every, only) if every or not failed else []


def _asked(item: Item, only: Sequence[str]) -> bool:
    from verify.gate.items import is_meant

    return not only or any(is_meant(item, pattern) for pattern in only)


def _run(
    chosen: Sequence[Item], results: dict[str, ItemResult], settings: GateSettings, clock: Clock, console: Console
) -> None:
    """Fill `results`, also where it is interrupted."""
    from contextlib import closing

    from verify.gate.run_items_within_budget import is_last, run_items
    from verify.gate.run_order import read_state, state_file
    from verify.gate.verify_item import perform_item
    from verify.operators.run.cache import open_cache

    state = read_state(state_file(settings.folder))
    cache = open_cache("verify_op", settings.folder) if settings.get("cache") else None
    if cache is not None and cache.problem is not None:
        console.warning(cache.problem)
    perform = perform_item(settings.folder, cache, settings.user_operators)
    with closing(run_items(chosen, state, clock, perform, settings.get("jobs"))) as runs:
        for unit, result in runs:
            results[unit.item.name] = result
            done = sum(is_last(r) for i in chosen if (r := results.get(i.name)) is not None)
            console.progress(f"{done:>3} of {len(chosen)}  {_line(unit.phase, result)}")


def _line(phase: str, result: ItemResult) -> str:
    """`PASS my_ops.py::f  PROVED (all sizes)  48 checks  0.2 s`."""
    report = result.report
    word = "PASS" if report.verdict.passes else "FAIL" if report.exit_code == 1 and not result.stop else "OPEN"
    word = {2: "STOP", 101: "BUG "}.get(result.stop, word)
    taken = "cached" if result.cached else f"{report.seconds:.1f} s"
    how = "text " if phase == "static" else ""
    return f"{word} {how}{result.name}  {report.verdict}  {report.total} checks  {taken}"


def _finish(
    options: argparse.Namespace,
    settings: GateSettings,
    items: tuple[Sequence[Item], Sequence[Item]],
    results: dict[str, ItemResult],
    entries: Sequence[KnownFinding],
    clock: Clock,
    interrupted: int,
) -> int:
    """Judge, remember, print, and return the exit code. `interrupted`: that of the signal that ended the gate, or 0."""
    from verify.gate.outcome import judge
    from verify.gate.run_items_within_budget import complete

    every, chosen = items
    asked = {item.name for item in chosen}
    completed = complete(chosen, results, "interrupted" if interrupted else "budget")
    completed += [result for name, result in results.items() if name not in asked]  # sources that cannot be listed
    names = {item.name for item in every}
    file = settings.baseline
    if interrupted or len(completed) > len(chosen) or _may_register_more(settings, results):
        names |= {entry.item for entry in entries}  # what was not listed is not gone
    if options.update_baseline and not interrupted:
        assert file is not None
        entries = _updated(options, file, completed, entries, names)
    outcome = judge(completed, entries, names, date.today(), "" if file is None else os.path.relpath(file))
    outcome = replace(outcome, interrupted=interrupted)
    _remember(settings, outcome)
    deliver(outcome, options, clock.spent, clock.budget)
    return outcome.ends_with


def _may_register_more(settings: GateSettings, results: Mapping[str, ItemResult]) -> bool:
    """Return whether operators of the models may be unknown: a plan, which shows them, did not run to its end."""
    ran = {name for name, result in results.items() if result.finished}
    return settings.user_operators is not None and any(plan.name not in ran for plan in settings.plans)


def _register(results: Mapping[str, ItemResult]) -> bool:
    return any(result.operators for result in results.values())


def _updated(
    options: argparse.Namespace, file: Path, results: Sequence[ItemResult], old: Sequence[KnownFinding], names: set[str]
) -> tuple[KnownFinding, ...]:
    from verify.gate.accepted_findings_with_owners import read_baseline, write_baseline
    from verify.gate.outcome import updated_entries

    console: Console = options.console
    blame = {"owner": options.owner, "expires": options.expires, "reason": options.reason}
    entries, refused = updated_entries(results, old, names, date.today(), blame)
    for finding in refused:
        console.warning(f"not written to the baseline, for it says that nothing was decided: {finding.message}")
    write_baseline(file, entries)
    console.progress(f"wrote {len(entries)} known findings to {file}")
    return read_baseline(file)


def _remember(settings: GateSettings, outcome: GateOutcome) -> None:
    from verify.gate.run_order import Last, read_state, state_file, write_state

    file = state_file(settings.folder)
    now = {
        judged.result.name: Last(judged.exit_code == 0, judged.result.report.seconds)
        for judged in outcome.judged
        if judged.word != "NOT RUN" and not judged.result.cached
    }
    write_state(file, read_state(file), now)


def deliver(outcome: GateOutcome, options: argparse.Namespace, seconds: float, budget: float | None) -> None:
    """Write the summary to stdout, and every format to where it was asked for.

    Raises NnscalerError `cannot_write` where a file cannot be written, after everything else was.
    """
    from nnscaler.cli.options import TEXT_FORMATS
    from nnscaler.cli.output.print_reports import destinations, write_files
    from verify.gate.render_outcome import render, summary

    console: Console = options.console
    text = summary(outcome, seconds, budget)
    where = destinations(options.output_format, os.environ)
    for name in where.stdout:
        if name != "full":  # the summary holds all that is in it
            console.result(render(name, outcome, seconds).rstrip("\n"))
    if any(name in TEXT_FORMATS for name in where.stdout):
        console.result(text.rstrip("\n"))
    write_files(where, lambda name: render(name, outcome, seconds), lambda: text)
