"""L3 of verify-plan: the program in a lower precision, against the noise of the model itself in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verify.programs.checks.context import Comparison, Outcome, Row
from verify.programs.execution.backends import run_program
from verify.programs.execution.failure import Failure
from verify.programs.low_precision import NoiseRow, low_precision_outcomes
from verify.programs.prepare import Prepared
from verify.programs.rank_task import failed, make_comparison, make_task
from verify.programs.reference.eager import Trajectory
from verify.programs.request import PlanRequest


def low_precision(
    request: PlanRequest, prepared: Prepared, reference: Trajectory, work: Path, dtypes: Sequence[str]
) -> list[Outcome]:
    """Run the program in each dtype, and compare every loss, gradient, parameter and buffer."""

    def run(precision: str | None, loss_scale: float) -> Comparison | Outcome:
        task = make_task(request, prepared, reference, work)
        task = replace(task, precision=precision, loss_scale=loss_scale)
        outcome = run_program(task, request.rank_count, request.runs_on, request.timeout, prepared.context.server)
        if isinstance(outcome, Failure):
            return failed(outcome, prepared, 0.0)
        return make_comparison(request, prepared, reference, outcome)

    outcomes, rows = low_precision_outcomes(request, prepared, reference, dtypes, run, prepared.context.progress)
    first, *others = outcomes
    return [replace(first, rows=tuple(_row(row) for row in rows)), *others]


def _row(row: NoiseRow) -> Row:
    return Row(f"{row.kind} in {row.dtype}", row.step, row.name, row.error, row.allowed, row.verdict)
