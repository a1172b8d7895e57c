"""The comparisons of a program with its model. A new check is a file here and a line in `run_checks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from verify.programs.checks import compare_gradients_and_state, gradient_norm, losses, replicas
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison


def run_checks(comparison: Comparison, initial_buffers: dict[str, Tensor]) -> list[CheckOutcome]:
    """Run every check, and record its time."""
    checks: tuple[Callable[[], CheckOutcome], ...] = (
        lambda: compare_gradients_and_state.check_coverage(comparison, initial_buffers),
        lambda: losses.check(comparison),
        lambda: compare_gradients_and_state.check_results(comparison),
        lambda: compare_gradients_and_state.check_gradients(comparison),
        lambda: gradient_norm.check(comparison),
        lambda: compare_gradients_and_state.check_parameters(comparison),
        lambda: compare_gradients_and_state.check_buffers(comparison),
        lambda: replicas.check(comparison),
    )
    outcomes = timed(checks)
    wrong = {o.check.name for o in outcomes if not o.check.verdict.passes}
    # a wrong norm follows from wrong gradients: the finding would repeat theirs
    follows = "gradients" in wrong
    return [replace(o, findings=()) if follows and o.check.name == gradient_norm.NAME else o for o in outcomes]


def timed(checks: Sequence[Callable[[], CheckOutcome]]) -> list[CheckOutcome]:
    """Run the checks and record the time of each; drop those that compared nothing."""
    outcomes: list[CheckOutcome] = []
    for check in checks:
        started = time.perf_counter()
        outcome = check()
        outcomes.append(replace(outcome, check=replace(outcome.check, seconds=time.perf_counter() - started)))
    return [outcome for outcome in outcomes if outcome.check.count]
