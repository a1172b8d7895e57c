"""The test result of one target: an identifier, a linear set, or a pair of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from verify.evidence.oracle.claims import Claimed, exercised_by
from verify.evidence.oracle.runner import CaseResult, Declined


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
