"""Compare the results besides the loss with the eager model's: as they lie on the ranks, and gathered."""

from __future__ import annotations

from verify.programs.checks.compare_gradients_and_state import Reference, compare
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.programs.checks.logical_tensors import by_rank, put_together
from verify.results.finding import Finding
from verify.results.tolerance import difference
from verify.results.verdict import Verdict


def check(comparison: Comparison) -> CheckOutcome:
    """Compare each result at every step, put together from the ranks' parts, and gathered by the runtime."""
    tally = Tally("other results", comparison.tolerance.level, comparison.tolerance)
    for step, expected in enumerate(comparison.reference.results):
        entries = by_rank(comparison.results, "result", step) if expected else {}
        for name, right in expected.items():
            holding = comparison.outputs.get(name)
            if holding is None:
                message = f"no rank of the program returns `{name}`"
                tally.add(Verdict.REFUTED, Finding("result_differs", message, comparison.place(name)))
                continue
            reference = Reference("result", step, {name: right}, 0.0)
            compare(tally, comparison, reference, put_together(holding, entries))
    if not tally.refuted:
        _gathered(tally, comparison)
    return tally.outcome()


def _gathered(tally: Tally, comparison: Comparison) -> None:
    """Compare what every rank has of the first step's results once they are gathered."""
    for rank in comparison.results:
        for name, found in rank.gathered.items():
            right = comparison.reference.results[0][name]
            gap = difference(found, right)
            verdict = comparison.tolerance.judge(("result", 0, name), gap.relative)
            finding = None
            if not verdict.passes and not tally.findings:
                message = f"the result `{name}` differs once it is gathered, on rank {rank.rank}: {gap}"
                facts = {"tensor": name, "step": "0", "rank": str(rank.rank)}
                finding = Finding("result_differs", message, comparison.place(name), facts)
            tally.add(verdict, finding, gap.relative)
