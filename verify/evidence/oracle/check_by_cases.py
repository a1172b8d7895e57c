"""Run the cases of one target, and sum them up as a check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from op_registry.spec import Refusal

from nnscaler.ir.operation_placement import Split
from verify.evidence.oracle.annotation_claims import Claimed, exercised_by
from verify.evidence.oracle.case_runner import CaseResult, Declined, OperatorRunner, WholeRaised
from verify.evidence.oracle.enumerate_cases import Enumerator, Target
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import DRAWS
from verify.results.report import Check
from verify.results.verdict import TESTED, Strength, Verdict

# The test result of one target: an identifier, a linear set, or a pair of them.


@dataclass(slots=True)
class TargetOutcome:
    """The results of one target's cases, added up.

    cases       cases that ran
    count       tensors that were compared
    exact       those among them that were bitwise equal
    failures    counter-examples
    skipped     reasons why partitions were not legal
    variants    (tensor, wrong variant) -> whether it was killed, whether it may be void, and the seeds of the draws
    exercised   claims that some case compared
    declined    claims of which the operator's hook refused a case
    untested    claims of the annotation that no case compared
    unseen      places in the operator's code where a branch on values went one way always
    cut         not all values were tried, as its code takes many steps
    left_out    notes on cases that say nothing of shards
    """

    cases: int = 0
    count: int = 0
    exact: int = 0
    failures: list[CaseResult] = field(default_factory=list)
    skipped: dict[str, None] = field(default_factory=dict)
    half_line: bool = False  # only positive inputs show anything
    variants: dict[tuple[str, str], tuple[bool, bool, frozenset[int]]] = field(default_factory=dict)
    exercised: set[Claimed] = field(default_factory=set)
    declined: set[Claimed] = field(default_factory=set)
    untested: tuple[Claimed, ...] = ()
    unseen: tuple[str, ...] = ()
    cut: bool = False
    left_out: dict[str, None] = field(default_factory=dict)

    def add(self, result: CaseResult) -> None:
        """Add the result of one case."""
        claim = exercised_by(result.case, result.signature)
        if result.refused:
            self.skipped[result.refused] = None
            if claim is not None and isinstance(result.refused, Declined):
                self.declined.add(claim)
            return
        self.cases += 1
        if result.compared is not None:
            self.count += result.compared.count
            if claim is not None and result.compared.count:
                self.exercised.add(claim)
            self.exact += result.compared.exact
            if not result.failed:
                for v in result.compared.variants:
                    killed, void, draws = self.variants.get((v.what, v.name), (False, True, frozenset()))
                    seeds = draws | {result.case.inputs.seed}
                    self.variants[v.what, v.name] = (killed or v.killed, void and v.void, seeds)
        else:
            self.count += 1
        if result.failed:
            self.failures.append(result)

    def add_beyond(self, other: TargetOutcome) -> None:
        """Add cases on values that need not tell a wrong result from the right one: all alike, or not finite."""
        self.cases += other.cases
        self.count += other.count
        self.exact += other.exact
        self.failures += other.failures
        self.unseen = tuple(dict.fromkeys((*self.unseen, *other.unseen)))
        self.cut |= other.cut

    def survived(self, draws: int) -> list[str]:
        """Return the wrong variants that nothing tells from the right result."""
        return [
            f"{name} {what}"
            for (what, name), (killed, void, seeds) in self.variants.items()
            if not killed and not (void and len(seeds) >= draws)
        ]

    def void(self, draws: int) -> list[str]:
        """Return the wrong variants that equal the right result because that is constant along the split."""
        return [
            f"{name} {what}"
            for (what, name), (killed, void, seeds) in self.variants.items()
            if not killed and void and len(seeds) >= draws
        ]


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


def run_cases(
    runner: OperatorRunner, cases: Iterable[SplitCase], outcome: TargetOutcome | None = None
) -> TargetOutcome:
    """Add the cases' results to an outcome; stops at the first failure, and where the budget of one claim is spent."""
    outcome = outcome or TargetOutcome()
    budget = runner.options.cases
    before = outcome.cases
    for case in cases:
        if budget is not None and outcome.cases - before >= budget:
            break
        try:
            result = runner.run(case)
            if (alone := _raises_alone(runner, result, outcome)) is not None:
                outcome.left_out[
                    f"`{runner.spec.name}` raises on one element of {alone}: not so small shards passed"
                ] = None
                continue
            outcome.add(result)
        except (WholeRaised, Refusal) as raised:  # the second where the sizes of a sample cannot be others
            outcome.skipped[str(raised)] = None
        if outcome.failures:
            break
    return outcome


def _raises_alone(runner: OperatorRunner, result: CaseResult, outcome: TargetOutcome) -> str | None:
    """Return what has one element only in each shard of a case, where the whole operator raises on so few elements as
    well and larger shards have passed: a statistic of one sample is none, and no program is wrong by that."""
    bound, claim = result.signature.bound, exercised_by(result.case, result.signature)
    if result.raised is None or bound is None or claim not in outcome.exercised:
        return None
    choice, parts, inputs = result.case.choices[0], result.case.parts[0], result.case.inputs
    if not isinstance(choice, Split) or bound.sizes[choice.identifier] != parts:
        return None
    local = {name: bound.sizes[name] // parts for name in bound.tied.get(choice.identifier, (choice.identifier,))}
    try:
        runner.exact(replace(inputs, sizes=tuple({**dict(inputs.sizes), **local}.items())))
    except Exception:  # noqa: BLE001 - whatever it raises, the shard has raised too
        return f"`{choice.identifier}`"
    return None


def one_way(places: Sequence[str]) -> str:
    """Say of branches on values that one side of them was never seen."""
    return f"{' and '.join(places)}: a branch on values that went one way on all inputs tried"


def as_check(name: str, outcome: TargetOutcome, seconds: float, strength: Strength = TESTED) -> Check:
    """Return the check of one target.

    Nothing compared is open; so is what a wrong variant survives. A proof strengthens only what has passed its tests.
    """
    refuted = len(outcome.failures) or int(strength.verdict is Verdict.REFUTED)
    details: list[str] = []
    if refuted:
        verdict = Verdict.REFUTED
    elif not outcome.count or outcome.untested or outcome.unseen or outcome.survived(DRAWS):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = strength.verdict
    if outcome.count and verdict.passes:
        details.append(f"{outcome.cases} cases")
        if outcome.cut:
            details.append("not all values were tried, as its code takes many steps")
        if void := outcome.void(DRAWS):
            details.append(f"constant along the split: {', '.join(void)}")
        if strength.reason:
            details.append(f"not proved for all sizes: {strength.reason}")
    elif not refuted:
        details += [one_way(outcome.unseen)] if outcome.unseen else []
        details += outcome.survived(DRAWS) or [f"not tested: {claim}" for claim in outcome.untested[:SHOWN]]
        details = details or list(outcome.skipped)
    return Check(name, verdict, outcome.count, refuted, seconds, "; ".join(details))
