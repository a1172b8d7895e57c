"""Run the cases of one target, and sum them up as a check."""

from __future__ import annotations

from collections.abc import Iterable

from verify.evidence.cases import Case
from verify.evidence.options import DRAWS
from verify.evidence.oracle.enumerate import Enumerator, Target
from verify.evidence.oracle.outcome import TargetOutcome
from verify.evidence.oracle.runner import Runner, WholeRaised
from verify.evidence.strength import TESTED, Strength
from verify.results.report import Check
from verify.results.verdict import Verdict

AGAIN = 8  # rounds of other inputs, where a wrong result looks right
SHOWN = 3  # untested claims in a check's detail


def check_target(enumerator: Enumerator, target: Target, outcome: TargetOutcome | None = None) -> TargetOutcome:
    """Run every case of one identifier or linear set; stop at the first failure.

    Where a wrong result looks right on all of these inputs (that of `any` is nearly constant), others are drawn.
    """
    outcome = run_cases(enumerator.runner, enumerator.singles(target), outcome)
    for again in range(1, AGAIN + 1):
        if outcome.failures or not outcome.survived(DRAWS):
            break
        outcome = run_cases(enumerator.runner, enumerator.more(target, again), outcome)
    outcome.half_line |= enumerator.half_line
    return outcome


def run_cases(runner: Runner, cases: Iterable[Case], outcome: TargetOutcome | None = None) -> TargetOutcome:
    """Add the cases' results to an outcome; stops at the first failure, and where the budget of one claim is spent."""
    outcome = outcome or TargetOutcome()
    budget = runner.options.cases
    before = outcome.cases
    for case in cases:
        if budget is not None and outcome.cases - before >= budget:
            break
        try:
            outcome.add(runner.run(case))
        except WholeRaised as raised:
            outcome.skipped[str(raised)] = None
        if outcome.failures:
            break
    return outcome


def as_check(name: str, outcome: TargetOutcome, seconds: float, strength: Strength = TESTED) -> Check:
    """Return the check of one target.

    Nothing compared is open; so is what a wrong variant survives. A proof strengthens only what has passed its tests.
    """
    refuted = len(outcome.failures) or int(strength.verdict is Verdict.REFUTED)
    details: list[str] = []
    if refuted:
        verdict = Verdict.REFUTED
    elif not outcome.count or outcome.untested or outcome.survived(DRAWS):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = strength.verdict
    if outcome.count and verdict.passes:
        details.append(f"{outcome.cases} cases")
        if void := outcome.void(DRAWS):
            details.append(f"constant along the split: {', '.join(void)}")
        if strength.blocker:
            details.append(f"not proved for all sizes: {strength.blocker}")
    elif not refuted:
        details += outcome.survived(DRAWS) or [f"not tested: {claim}" for claim in outcome.untested[:SHOWN]]
        details = details or list(outcome.skipped)
    return Check(name, verdict, outcome.count, refuted, seconds, "; ".join(details))
