"""`nnscaler list`: what there is to name on a command line."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nnscaler.cli.console import Console

EPILOG = """examples:
  nnscaler list ops             operators with an annotation, and the annotation
  nnscaler list plans           what --plan may say
  nnscaler list schedules       what --schedule may say
"""
PLANS = (
    ("dp=N", "data parallelism: the batch is split, parameters are copied, gradients are summed"),
    ("tp=N", "tensor parallelism: matrices are split, found from the operators' annotations"),
    ("pp=N", "pipeline parallelism: layers are split into stages; see --micro-batches and --schedule"),
    ("dp=2,tp=2,pp=2", "their product, on 8 ranks"),
    ("plan.json", "a plan that `nnscaler compile` wrote, or that you edited"),
    ("policy.py::function", "a function of yours: (graph, ranks) -> nnscaler.Plan"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], exit_codes: str) -> None:
    """Adds the command to the parser."""
    from nnscaler.cli.options import add_verbosity

    parser = commands.add_parser(
        "list",
        help="list operators, plans or schedules",
        description="List what can be named on a command line.",
        epilog=f"{EPILOG}\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("ops", "plans", "schedules"))
    add_verbosity(parser.add_argument_group("output"))
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Prints the list."""
    console: Console = options.console
    rows = {"ops": _operators, "plans": lambda: list(PLANS), "schedules": _schedules}[options.what]()
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        console.result(f"{name:<{width}}  {text}")
    return 0


def _operators() -> list[tuple[str, str]]:
    from op_registry.registry import default_registry

    registry = default_registry()
    rows: list[tuple[str, str]] = []
    for name in registry.names():
        spec = registry.lookup(name)
        if spec is not None:
            rows.append((name, spec.annotation if isinstance(spec.annotation, str) else "(depends on the arguments)"))
    return rows


def _schedules() -> list[tuple[str, str]]:
    from nnscaler.scheduling.registry import SCHEDULES

    return [(name, (inspect.getdoc(function) or "").split("\n")[0]) for name, function in SCHEDULES.items()]
