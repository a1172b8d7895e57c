"""The norm of all gradients, as clipping sees it, on every rank."""

from __future__ import annotations

from verify.compare import difference, is_finite
from verify.finding import Finding
from verify.plan_checks.context import Comparison, Outcome, Tally
from verify.verdict import Verdict

NAME = "gradient norm, clipped"


def check(comparison: Comparison) -> Outcome:
    """Compares with what torch.nn.utils.clip_grad_norm_ returns for the model; the ranks must agree bitwise."""
    tally = Tally(NAME, comparison.tolerance.level, comparison.tolerance)
    expected = comparison.reference.norm
    if expected is None:
        return tally.outcome()
    step = comparison.steps - 1
    key = ("norm", step, "")
    first = next((r.norm for r in comparison.results if r.norm is not None), None)
    for result in comparison.results:
        facts = {"tensor": "gradient norm", "step": str(step), "rank": str(result.rank)}
        if result.norm is None:
            message = f"rank {result.rank} knows no norm of the gradients of step {step}"
            tally.add(Verdict.REFUTED, Finding("gradient_norm_differs", message, counter_example=facts))
            continue
        found = difference(result.norm, expected)
        verdict = comparison.tolerance.judge(key, found.relative)
        if first is not None and float(first) != float(result.norm):
            verdict = Verdict.REFUTED  # ranks that scale by different factors drift apart
        finding = None
        if not verdict.passes:
            code = "gradient_norm_differs" if is_finite(result.norm) else "not_finite"
            finding = Finding(
                code if verdict is Verdict.REFUTED else "near_threshold",
                f"the norm of all gradients of step {step} differs on rank {result.rank}: {found}",
                None,
                {**facts, "expected": f"{float(expected):.17g}", "actual": f"{float(result.norm):.17g}"},
                _cause(float(result.norm), float(expected)),
            )
        tally.add(verdict, finding if not tally.findings else None, found.relative, key)
    return tally.outcome()


def _cause(actual: float, expected: float) -> str | None:
    """A square that is a simple multiple of the right one."""
    if not expected > 0:
        return None
    ratio = (actual / expected) ** 2
    for n in range(2, 65):
        if abs(ratio - n) < 1e-6 * n:
            return f"its square is {n} times the model's: elements that {n} ranks hold are counted {n} times"
        if abs(ratio * n - 1) < 1e-6:
            return f"its square is 1/{n} of the model's: shards of other ranks are not counted"
    return None
