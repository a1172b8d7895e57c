"""The work of a child process of the gate on one item: a plan as in `verify-plan`, an operator as in `verify-op`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.cli.console import Console
from nnscaler.errors import NnscalerError

if TYPE_CHECKING:
    from verify.gate.items import Item, PlanItem
    from verify.gate.order import Phase
    from verify.op_run.cache import Cache
    from verify.report import Report

SHARE = 0.8  # of an item's time that the run of its program may take: what hangs is better told by the run itself


class NotingConsole(Console):
    """Says nothing, and notes each phase."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__("never", 0)
        self._note = note

    def progress(self, text: str) -> None:
        self._note(" ".join(text.split()))


def perform_item(
    folder: Path, cache: Cache | None
) -> Callable[[Item, Phase, Callable[[str], None]], tuple[Report, bool]]:
    """Return the function that verifies an item in a child process. `folder`: of the settings."""
    from verify.gate.items import OpItem

    def perform(item: Item, phase: Phase, note: Callable[[str], None]) -> tuple[Report, bool]:
        if isinstance(item, OpItem):
            from verify.gate.work import verify_operator

            return verify_operator(item, folder, cache, note)
        note(f"loading {item.model}")
        return verify_plan_item(item, phase, note), False

    return perform


def verify_plan_item(item: PlanItem, phase: Phase, note: Callable[[str], None]) -> Report:
    """As the command line `plan_arguments` would. Raises NnscalerError."""
    from nnscaler.cli import verify_plan
    from nnscaler.cli.main import build_parser

    try:
        options: argparse.Namespace = build_parser().parse_args(plan_arguments(item, phase))
    except SystemExit:  # argparse has said why, to stderr
        raise NnscalerError("usage", f"verify-plan refuses the settings of {item.name!r}") from None
    options.console = NotingConsole(note)
    return verify_plan.verify(options)


def plan_arguments(item: PlanItem, phase: Phase) -> list[str]:
    """Return the command line of an item."""
    words = ["verify-plan", item.model, f"--seed={item.seed}", f"--timeout={max(1.0, SHARE * item.timeout):g}"]
    for name, value in item.options.items():
        if name == "depth":
            words += [] if value == "default" else [f"--{value}"]
        elif isinstance(value, bool):
            words += [f"--{name}"] if value else []
        elif isinstance(value, tuple):
            words += [f"--{name}={entry}" for entry in value]
        else:
            words.append(f"--{name}={value}")
    return [*words, f"--level={phase}"]
