"""The loss of every step on every rank that knows it, and the loss without backward."""

from __future__ import annotations

from verify.programs.checks.cause import CLOSE
from verify.programs.checks.context import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.tolerance import difference, family_scale, is_finite
from verify.results.verdict import Verdict


def check(comparison: Comparison) -> CheckOutcome:
    """Compare each rank's loss with the model's."""
    tally = Tally("loss", comparison.tolerance.level, comparison.tolerance)
    scale = family_scale(comparison.reference.losses)
    for step, expected in enumerate(comparison.reference.losses):
        known = [(r.rank, loss) for r in comparison.results if (loss := r.losses[step]) is not None]
        if not known:
            tally.add(Verdict.REFUTED, Finding("loss_missing", f"no rank returns the loss of step {step}"))
        cause = _unsummed([float(loss) for _, loss in known], float(expected))
        for rank, actual in known:
            found = difference(actual, expected, scale)
            key = ("loss", step, "")
            verdict = comparison.tolerance.judge(key, found.relative)
            finding = None
            if not verdict.passes:
                code = "loss_differs" if is_finite(actual) else "not_finite"
                finding = Finding(
                    _code(verdict, code),
                    f"the loss of step {step}, `{comparison.loss}`, differs on rank {rank}: {found}",
                    comparison.loss_place,
                    {
                        "tensor": comparison.loss,
                        "step": str(step),
                        "rank": str(rank),
                        "expected": f"{found.expected:.17g}",
                        "actual": f"{float(actual):.17g}",
                        "relative difference": f"{found.relative:.3g}",
                        "allowed": f"{comparison.tolerance.allowed(key):.3g}",
                    },
                    cause,
                )
            # one finding a step: the others only repeat it
            repeated = any(
                f.code == finding.code and f.counter_example["step"] == str(step)
                for f in tally.findings
                if finding and f.counter_example
            )
            tally.add(verdict, None if repeated else finding, found.relative, key)
    return tally.outcome()


def _unsummed(losses: list[float], expected: float) -> str | None:
    """Explain losses that are parts of a sum, of which several may be copies; None for other losses."""
    if len(set(losses)) < 2:
        return None
    if all(abs(sum(losses) - copies * expected) > CLOSE * abs(expected) for copies in range(1, len(losses))):
        return None
    return "the losses of the ranks add up to the model's: each is a part of a sum that nobody took"


def _code(verdict: Verdict, code: str) -> str:
    return code if verdict is Verdict.REFUTED else "near_threshold"


# The loss of the first step as the program computes it without backward, against the model's.


def check_forward_only(comparison: Comparison) -> CheckOutcome:
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
