"""`nnscaler list`: print what can be named on a command line, and which operators a model calls without annotation."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import TYPE_CHECKING

from nnscaler.cli.options import MODEL_HELP, add_verbosity, seconds, seed_number
from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError
from nnscaler.model_file import check_targets, load_model_file

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.operators.unannotated.report_missing_operators import MissingReport


def missing_of(
    target: str, seed: int, loss_fn: str | None, specialise: bool, timeout: float, console: Console
) -> MissingReport:
    """Report on `model.py` or `model.py::factory`. Raises NnscalerError as loading and tracing do."""
    check_targets(target, loss_fn)
    from nnscaler.tracing import trace
    from verify.operators.unannotated.report_missing_operators import report_missing

    model = load_model_file(target, seed, loss_fn)
    console.progress(f"load         {model.name}")
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions without annotation: the report is about them
        traced = trace(model.build(), model.inputs, specialise=specialise)
    taken = time.perf_counter() - started
    console.progress(f"trace        {taken:5.1f} s  {len(traced.graph.operations)} operations")
    for note in traced.notes:
        console.detail(note)
    return report_missing(model.name, traced, timeout, console.progress)


NAME = "list"
HELP = "list operators, plans or schedules"
DESCRIPTION = "List what can be named on a command line, or which annotations a model lacks."
EPILOG = """examples:
  nnscaler list ops                           operators with an annotation, and the annotation
  nnscaler list ops --missing model.py        operators that the model calls and that have none, each with code to paste
  nnscaler list ops --missing model.py --json
  nnscaler list plans                         what --plan may say
  nnscaler list schedules                     what --schedule may say

--missing traces the model as verify-plan does (parameters may be on the meta device). An operator without annotation
runs whole on every rank, which gathers what it reads. For each one that a parameter reaches, the widest annotation is
inferred from the calls that the model makes, and tested in 2, 3 and 4 parts before it is shown, with the register_op
call to paste. What no parameter reaches is computed on every rank from what it has, and costs nothing.

exit codes of --missing:
  0 nothing that a parameter reaches is missing   1 something is   2 could not run (usage, the model does not trace)
"""
PLANS = (
    ("dp=2,tp=2,pp=2", "their product, on 8 ranks"),
    ("auto", "the fastest plan that the planner finds for this machine; auto:h100x8 for a cluster: docs/planner.md"),
    ("plan.json", "a plan that `nnscaler plan` or `nnscaler compile` wrote, or that you edited"),
    ("policy.py::function", "a function of yours: (graph, ranks) -> nnscaler.Plan"),
)
SCHEDULE_FORMS = (
    ("interleaved:3", "with another number of stages on each device; so zb-h1-half:1, of few layers"),
    ("search", "the best order that is found for the plan's stages; search:zb-v: for stages where zb-v has them"),
    ("orders.csv", "one that torch.distributed.pipelining wrote, or can run: docs/schedules.md"),
    ("mine.py::function", "a function of yours: (devices, chunks, micro_batches) -> a text of orders per device"),
    ("plan.json", "that of a saved plan"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("what", choices=("ops", "plans", "schedules"))
    group = parser.add_argument_group("with ops")
    group.add_argument("--missing", metavar="MODEL", help=f"what this model lacks: {MODEL_HELP}")
    group.add_argument("--loss-fn", metavar="FILE.py::FN", help="for a model that returns no loss, as of verify-plan")
    group.add_argument(
        "--specialise", action="store_true", help="where the model branches on its data, take the sample batch's branch"
    )
    group.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of parameters and sample batch (default: 0)"
    )
    group.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="seconds to suggest one annotation (default: 60)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the list as JSON")
    add_verbosity(output)


def run(options: argparse.Namespace) -> int:
    """Print the list."""
    console: Console = options.console
    if options.missing is not None:
        return _missing(options, console)
    rows = {"ops": _operators, "plans": _plans, "schedules": _schedules}[options.what]()
    if options.json:
        console.result(json.dumps([{"name": name, "text": text} for name, text in rows], indent=1))
        return ExitCode.VERIFIED
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        console.result(f"{name:<{width}}  {text}")
    return ExitCode.VERIFIED


def _missing(options: argparse.Namespace, console: Console) -> int:
    """Print the operators that a model lacks; return 1 where there are some."""
    if options.what != "ops":
        raise NnscalerError(
            "usage", f"--missing is about ops, not {options.what}", help="nnscaler list ops --missing MODEL"
        )

    report = missing_of(options.missing, options.seed, options.loss_fn, options.specialise, options.timeout, console)
    if options.json:
        console.result(json.dumps(report.as_dict(), indent=1))
    else:
        from verify.operators.unannotated.report_missing_operators import missing_lines

        console.lines(missing_lines(report))
    return ExitCode.REFUTED if report.rows else ExitCode.VERIFIED


def _operators() -> list[tuple[str, str]]:
    from op_registry.registry import default_registry

    registry = default_registry()
    rows: list[tuple[str, str]] = []
    for name in registry.names():
        spec = registry.lookup(name)
        if spec is not None:
            rows.append((name, spec.annotation if isinstance(spec.annotation, str) else "(depends on the arguments)"))
    return rows


def _plans() -> list[tuple[str, str]]:
    from nnscaler.planning.named_policies import READY
    from nnscaler.planning.parse_axes import AXES

    axes = ((f"{name}=N", text) for name, text in AXES.items())
    return [*axes, *PLANS, *((name, f"ready: {policy.text}") for name, policy in READY.items())]


def _schedules() -> list[tuple[str, str]]:
    from nnscaler.scheduling.registry import SCHEDULES

    return [*((name, kind.summary) for name, kind in SCHEDULES.items()), *SCHEDULE_FORMS]
