"""The loss of the first step as the program computes it without backward, against the model's."""

from __future__ import annotations

from verify.programs.checks.context import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.tolerance import difference
from verify.results.verdict import Verdict


def check(comparison: Comparison) -> CheckOutcome:
    """Compare what `RankExecutor.forward_only` returns on each rank that knows the loss."""
    tally = Tally("loss without backward", comparison.tolerance.level, comparison.tolerance)
    known = [(r.rank, r.forward_loss) for r in comparison.results if r.forward_loss is not None]
    if not known:
        tally.add(Verdict.REFUTED, Finding("loss_missing", "no rank returns the loss without backward"))
    for rank, actual in known:
        found = difference(actual, comparison.reference.losses[0])
        verdict = comparison.tolerance.judge(("loss", 0, ""), found.relative)
        finding = None if verdict.passes or tally.findings else _finding(comparison, rank, str(found))
        tally.add(verdict, finding, found.relative, ("loss without backward", 0, comparison.loss))
    return tally.outcome()


def _finding(comparison: Comparison, rank: int, found: str) -> Finding:
    return Finding(
        "forward_only_differs",
        f"without backward the loss, `{comparison.loss}`, differs on rank {rank}: {found}",
        comparison.loss_place,
        {"tensor": comparison.loss, "step": "0", "rank": str(rank)},
    )
