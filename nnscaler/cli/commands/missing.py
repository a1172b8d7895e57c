"""List the operators of a model file that lack an annotation."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

from nnscaler.model_file import check_targets, load_model_file

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from verify.operators.missing.report import MissingReport


def missing_of(
    target: str, seed: int, loss_fn: str | None, specialise: bool, timeout: float, console: Console
) -> MissingReport:
    """Report on `model.py` or `model.py::factory`. Raises NnscalerError as loading and tracing do."""
    check_targets(target, loss_fn)
    from nnscaler.tracing import trace
    from verify.operators.missing.report import report_missing

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
