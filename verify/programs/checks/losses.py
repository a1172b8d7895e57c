"""Check the loss of every step on every rank that knows it, and the loss without backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nnscaler.runtime.shards import unravel
from nnscaler.runtime.tensor_bits_and_differences import difference, family_scale, real_numbers
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import WrongTensor
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.verdict import Verdict


def check(comparison: Comparison) -> CheckOutcome:
    """Compare each rank's loss with the model's."""
    tally = Tally("loss", comparison.tolerance.level, comparison.tolerance)
    scale = family_scale(comparison.reference.losses)
    for step, expected in enumerate(comparison.reference.losses):
        known = {r.rank: loss for r in comparison.results if (loss := r.losses[step]) is not None}
        if not known:
            tally.add(Verdict.REFUTED, Finding("loss_missing", f"no rank returns the loss of step {step}"))
        cause = _cause(comparison, known, expected)
        for rank, actual in known.items():
            found = difference(actual, expected, scale)
            key = ("loss", step, "")
            verdict = comparison.tolerance.judge(key, found.relative)
            finding = None
            if not verdict.passes:
                code = "not_finite" if found.not_finite else "loss_differs"
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
                        "allowed": f"{comparison.tolerance.bound:.3g}",
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


def _cause(comparison: Comparison, losses: Mapping[int, Tensor], expected: Tensor) -> str | None:
    """Explain losses by those of the other ranks, which lie on the axes of a stage that all of them run."""
    holding = next((h for h in comparison.parameters.values() if set(losses) <= set(h.ranks)), None)
    axes = {} if holding is None else holding.axes
    at = {(r, 0): {"ranks": r} if holding is None else unravel(holding.ranks.index(r), axes) for r in losses}
    pieces = {(rank, 0): real_numbers(loss) for rank, loss in losses.items()}
    return cause_of(WrongTensor("loss", pieces, real_numbers(expected), at, sizes=axes)).told


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
