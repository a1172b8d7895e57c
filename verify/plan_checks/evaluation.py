"""The loss of the program in evaluation mode, forward only, against the model's."""

from __future__ import annotations

from torch import Tensor

from verify.compare import difference
from verify.finding import Finding
from verify.plan_checks.context import Comparison, Outcome, Tally
from verify.verdict import Verdict


def check(comparison: Comparison, expected: Tensor, *, own: bool) -> Outcome:
    """`own`: the program was compiled for evaluation mode, and is not the one that trains."""
    tally = Tally("evaluation mode", comparison.tolerance.level, comparison.tolerance)
    known = [(r.rank, r.evaluated) for r in comparison.results if r.evaluated is not None]
    if not known:
        tally.add(Verdict.REFUTED, Finding("loss_missing", "no rank returns the loss in evaluation mode"))
    for rank, actual in known:
        found = difference(actual, expected)
        verdict = comparison.tolerance.judge(("loss", 0, ""), found.relative)
        finding = None if verdict.passes or tally.findings else _finding(comparison, rank, str(found), own)
        tally.add(verdict, finding, found.relative, ("evaluation", 0, comparison.loss))
    return tally.outcome()


def _finding(comparison: Comparison, rank: int, found: str, own: bool) -> Finding:
    which = "compiled for evaluation mode" if own else "that trains, forward only"
    return Finding(
        "evaluation_differs",
        f"in evaluation mode the loss, `{comparison.loss}`, differs on rank {rank}: {found}",
        comparison.loss_place,
        {"tensor": comparison.loss, "step": "0", "rank": str(rank), "program": which},
    )
