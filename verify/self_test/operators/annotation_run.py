"""The table of annotation mutants: which stage refutes each, and whether those that nothing refutes are true."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nnscaler.ir.signature import Signature
from verify.evidence.options import Safeguards
from verify.self_test.operators.annotation_mutants import annotation_mutants
from verify.self_test.operators.claim_oracle import Answer, Claim, ask, bind_mutant, claims_of, confirmed, truly_holds
from verify.self_test.operators.subjects import SampledCall

STAGES = ("registration", "shape", "shard raises", "values")
SURVIVORS = ("same claims", "weaker", "hook refuses", "holds", "missed")


@dataclass(frozen=True)
class AskedClaim:
    """A claim that no right annotation makes, and what became of it. `holds`: the second opinion on one that passes."""

    subject: SampledCall
    signature: Signature
    claim: Claim
    identifier: str
    text: str
    answer: Answer
    holds: bool = False

    @property
    def false(self) -> bool:
        """Return whether the claim is false, and only values can show it."""
        return self.answer.found == "values" or (self.answer.found == "passes" and not self.holds)

    @property
    def missed(self) -> bool:
        return self.answer.found == "passes" and not self.holds


@dataclass
class AnnotationTable:
    """The table of wrong annotations.

    stages    stage that refutes a mutant -> number of mutants
    claims    the claims that were put to the oracle
    disputed  refuted claims that the second opinion finds true: false alarms
    """

    subjects: int = 0
    mutants: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    claims: list[AskedClaim] = field(default_factory=list)
    disputed: list[AskedClaim] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reach_values(self) -> list[AskedClaim]:
        """False claims that only values can refute."""
        return [c for c in self.claims if c.false]

    @property
    def missed(self) -> list[AskedClaim]:
        return [c for c in self.claims if c.missed]

    @property
    def true(self) -> list[AskedClaim]:
        """Claims that hold although the annotation does not make them."""
        return [c for c in self.claims if c.holds]

    @property
    def good(self) -> bool:
        """All that is required: something was refuted by values, nothing missed, nothing disputed."""
        return bool(self.reach_values) and not self.missed and not self.disputed


def run_annotations(
    subjects: Iterable[SampledCall], progress: Callable[[str], None], safeguards: Safeguards | None = None
) -> AnnotationTable:
    """Judge every mutant of every subject's annotation."""
    started = time.perf_counter()
    table = AnnotationTable()
    for subject in subjects:
        progress(subject.name)
        _run_subject(table, subject, safeguards or Safeguards())
    table.seconds = time.perf_counter() - started
    return table


def _run_subject(table: AnnotationTable, subject: SampledCall, safeguards: Safeguards) -> None:
    table.subjects += 1
    right = claims_of(subject.signature)
    asked: dict[Claim, AskedClaim] = {}
    for mutant in annotation_mutants(subject.text):
        table.mutants += 1
        bound = bind_mutant(subject, mutant.text)
        if isinstance(bound, str):
            table.stages[bound] += 1
            continue
        made = claims_of(bound)
        new = [c for c in made if c not in right]
        if not new:
            table.stages["same claims" if len(made) == len(right) else "weaker"] += 1
            continue
        for claim in new:
            if claim not in asked:
                asked[claim] = _asked(table, subject, bound, claim, made[claim], mutant.text, safeguards)
        table.stages[_stage([asked[c] for c in new])] += 1
    table.claims += asked.values()


def _asked(
    table: AnnotationTable,
    subject: SampledCall,
    signature: Signature,
    claim: Claim,
    identifier: str,
    text: str,
    safeguards: Safeguards,
) -> AskedClaim:
    answer = ask(subject, signature, identifier, safeguards)
    true = answer.found == "passes" and truly_holds(subject, signature, identifier)
    found = AskedClaim(subject, signature, claim, identifier, text, answer, true)
    if answer.found == "values" and not confirmed(subject, signature, identifier, answer):
        table.disputed.append(found)
    return found


def _stage(asked: list[AskedClaim]) -> str:
    """Classify the fate of a mutant by the first thing that refutes its new claims."""
    found = [c.answer.found for c in asked]
    if "raises" in found:
        return "shard raises"
    if "values" in found:
        return "values"
    if any(c.missed for c in asked):
        return "missed"
    return "holds" if any(c.holds for c in asked) else "hook refuses"
