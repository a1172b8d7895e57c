"""Check the norm of all gradients, as clipping sees it, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nnscaler.runtime.tensor_bits_and_differences import difference, largest, real_numbers
from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import EPSILON
from verify.programs.causes.wrong_tensor import CLOSE
from verify.programs.checks.input_and_outcome import CheckOutcome, Comparison, Tally
from verify.results.finding import Finding
from verify.results.verdict import Verdict

NAME = "gradient norm, clipped"


def check(comparison: Comparison) -> CheckOutcome:
    """Compare with what torch.nn.utils.clip_grad_norm_ returns for the model; the ranks must agree bitwise."""
    tally = Tally(NAME, comparison.tolerance.level, comparison.tolerance)
    expected = comparison.reference.norm
    if expected is None:
        return tally.outcome()
    step = comparison.steps - 1
    key = ("norm", step, "")
    known = [float(r.norm) for r in comparison.results if r.norm is not None]
    for result in comparison.results:
        facts = {"tensor": "gradient norm", "step": str(step), "rank": str(result.rank)}
        if result.norm is None:
            message = f"rank {result.rank} knows no norm of the gradients of step {step}"
            tally.add(Verdict.REFUTED, Finding("gradient_norm_differs", message, counter_example=facts))
            continue
        found = difference(result.norm, expected)
        verdict = comparison.tolerance.judge(key, found.relative)
        if known[0] != float(result.norm):
            verdict = Verdict.REFUTED  # ranks that scale by different factors drift apart
        finding = None
        if not verdict.passes:
            code = "not_finite" if found.not_finite else "gradient_norm_differs"
            finding = Finding(
                code if verdict is Verdict.REFUTED else "near_threshold",
                f"the norm of all gradients of step {step} differs on rank {result.rank}: {found}",
                None,
                {**facts, "expected": f"{float(expected):.17g}", "actual": f"{float(result.norm):.17g}"},
                own_norms(known, float(expected)) or cause_of_norm(float(result.norm), float(expected)),
            )
        tally.add(verdict, finding if not tally.findings else None, found.relative, key)
    return tally.outcome()


def own_norms(norms: Sequence[float], expected: float, close: float = CLOSE) -> str | None:
    """Explain how the ranks' norms differ from each other; None if they are equal."""
    if len(set(norms)) < 2:
        return None
    total = sum(norm**2 for norm in norms) ** 0.5
    if abs(total - expected) <= close * expected:
        return "each rank has the norm of its own gradients: their squares are not summed over the ranks"
    return "the ranks have different norms: they clip by different factors, and their copies drift apart"


def cause_of_update(comparison: Comparison, name: str, value: Tensor) -> str | None:
    """Return why a parameter is not the model's after the last step, where its gradients are: by which factor the
    gradient was scaled before the update. None where no factor explains it."""
    reference = comparison.reference
    gradient, expected = reference.gradients[-1].get(name), reference.parameters[name]
    limit, norm = reference.settings.max_norm, reference.norm
    if gradient is None or limit is None or norm is None or not largest(gradient) > 0:
        return None
    off = (real_numbers(expected) - real_numbers(value)) / reference.learning_rate
    wide = real_numbers(gradient)
    scale = float((off * wide).sum() / (wide * wide).sum())
    if difference(off, scale * wide).relative > CLOSE:
        return None
    right = min(1.0, limit / (float(norm) + EPSILON))
    factor = right + scale
    if abs(factor - 1.0) < CLOSE and right < 1.0:
        return (
            f"the gradients of the last step are not clipped: their norm is {float(norm):.6g}, clipping to {limit:g} "
            "scales them down, and the update has all of the gradient"
        )
    other = f", as if their norm were {limit / factor:.6g}" if factor > CLOSE else ""
    return (
        f"the gradients of the last step are clipped wrongly: they are scaled by {factor:.6g}{other}, and clipping a "
        f"norm of {float(norm):.6g} to {limit:g} scales them by {right:.6g}"
    )


def cause_of_norm(actual: float, expected: float, close: float = CLOSE) -> str | None:
    """Explain a norm whose square is a simple multiple of the right one's; None for another norm."""
    if not expected > 0:
        return None
    ratio = (actual / expected) ** 2
    for n in range(2, 65):
        if abs(ratio - n) < close * n:
            return f"its square is {n} times the model's: elements that {n} ranks hold are counted {n} times"
        if abs(ratio * n - 1) < close:
            return f"its square is 1/{n} of the model's: shards of other ranks are not counted"
    return None
