"""Judge wrong annotations: which stage of verify-op refutes each, and whether those that nothing refutes are true.

A claim is what an annotation says about a call: for every identifier that may be split, the state of each operand.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from op_registry.annotation.well_formed import parse_checked
from op_registry.bind_and_localise_call import bind_call, size_arguments
from op_registry.call import Call
from op_registry.registry import output_only
from op_registry.spec import Refusal

from nnscaler.errors import AnnotationError
from nnscaler.ir.derive_operand_layouts import explain_illegal_choice, input_states, output_states
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from nnscaler.layout import State
from verify.evidence.oracle.case_runner import Prepared
from verify.evidence.oracle.compare_partition import ShardRaised, compare_partition, make_partition
from verify.evidence.oracle.size_checked_kernels import raised_on_meta
from verify.evidence.verify_op_options import Safeguards
from verify.self_test.operators.annotation_mutants import annotation_mutants
from verify.self_test.operators.calls_for_annotation_mutants import SampledCall
from verify.self_test.operators.second_opinion import holds
from verify.self_test.run_rows import Progress, run_rows

PARTS = (2, 3, 4, 5, 7)  # one of them must divide a size, or nothing is claimed


@dataclass(frozen=True, slots=True)
class Claim:
    """The operands' states under a split of an identifier.

    size   of the identifier
    names  identifiers that are split, where the operator's hook, or an argument of that name, reads them; else empty
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    size: int
    names: tuple[str, ...] = ()


def claims_of(signature: Signature) -> Mapping[Claim, str]:
    """Return every claim of an annotation that is bound to a call, and the identifier that makes it."""
    bound, spec = signature.bound, signature.spec
    assert bound is not None and spec is not None
    hooked = spec.localize is not None or spec.random
    divided = size_arguments(spec, signature.call)
    found: dict[Claim, str] = {}
    for name, size in bound.sizes.items():
        together = bound.tied.get(name, (name,))
        if together[0] != name or size < 2:
            continue
        split = Split(name)
        if all(explain_illegal_choice(signature, split, parts) is not None for parts in PARTS):
            continue
        named = hooked or any(n in divided for n in together)
        outputs = output_states(signature, split, len(signature.call.outputs))
        found.setdefault(Claim(input_states(signature, split), outputs, size, together if named else ()), name)
    return found


Found = Literal["raises", "values", "refused", "passes"]
OUTERS = (1, 2)
OPINION_PARTS = (2, 3, 5)
OPINION_SEEDS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """`found`: what refuted the claim, if anything; `parts` and `outer` of the split that did."""

    found: Found
    parts: int = 0
    outer: int = 1


def bind_mutant(subject: SampledCall, text: str) -> Signature | Literal["registration", "shape"]:
    """Return the mutated annotation bound to the subject's call, or the stage that refuses it."""
    call = subject.signature.call
    try:
        parse_checked(text, output_only(subject.spec, call.kwargs))
    except AnnotationError:
        return "registration"
    sizes = dict(subject.given)

    def annotation(_: Call) -> tuple[str, Mapping[str, int]]:
        return text, sizes

    spec = replace(subject.spec, annotation=text if not sizes else annotation)
    try:
        bound = bind_call(spec, call)
    except AnnotationError:
        return "shape"
    return Signature(call, spec, bound, subject.signature.linear)


def ask(subject: SampledCall, signature: Signature, identifier: str, safeguards: Safeguards) -> Answer:
    """Split the identifier; the first failure is the answer."""
    seen = False
    for number, prepared in enumerate(subject.runs):
        for outer in OUTERS if safeguards.outers else (1,):
            split = Split(identifier, outer)
            for parts in _parts(signature, split, safeguards):
                found = _one(subject, signature, prepared, split, parts, safeguards, number == 0)
                if found in ("raises", "values"):
                    return Answer(found, parts, outer)
                seen = seen or found == "passes"
    return Answer("passes" if seen else "refused")


def _parts(signature: Signature, split: Split, safeguards: Safeguards) -> list[int]:
    """Return the numbers of shards that are tried; where none of them divides the size, the first that does."""
    legal = [p for p in safeguards.parts if explain_illegal_choice(signature, split, p) is None]
    return legal or [p for p in PARTS if explain_illegal_choice(signature, split, p) is None][:1]


def _one(
    subject: SampledCall,
    signature: Signature,
    prepared: Prepared,
    split: Split,
    parts: int,
    safeguards: Safeguards,
    first: bool,
) -> Found:
    try:
        partition = make_partition(signature, [split], [parts])
    except Refusal:
        return "refused"
    except Exception:  # noqa: BLE001 - a hook that does not know the identifier: loud, like a shard that raises
        return "raises"
    if first and raised_on_meta(subject.spec, prepared.whole, partition) is not None:
        return "raises"
    try:
        compared = compare_partition(
            prepared.whole, partition, torch.Generator().manual_seed(parts), prepared.bound, safeguards
        )
    except ShardRaised:
        return "raises"
    return "values" if compared.mismatches else "passes"


def truly_holds(subject: SampledCall, signature: Signature, identifier: str) -> bool:
    """Return the second opinion on a claim that passes."""
    decided = False
    for seed in range(OPINION_SEEDS):
        other = subject.other_run(seed)
        if other is None:
            continue
        for parts in OPINION_PARTS:
            if explain_illegal_choice(signature, Split(identifier), parts) is not None:
                continue
            opinion = holds(other.whole, signature, Split(identifier), parts, seed)
            if opinion is False:
                return False
            decided = decided or opinion is True
    return decided


def confirmed(subject: SampledCall, signature: Signature, identifier: str, answer: Answer) -> bool:
    """Return whether the second opinion, too, finds a refuted claim false, on the very split that refuted it."""
    for seed, prepared in enumerate(subject.runs):
        if holds(prepared.whole, signature, Split(identifier, answer.outer), answer.parts, seed) is not True:
            return True
    return False


# -- the table ---------------------------------------------------------------------------------------------------------

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
    subjects: Iterable[SampledCall], progress: Progress, safeguards: Safeguards | None = None
) -> AnnotationTable:
    """Judge every mutant of every subject's annotation."""
    started = time.perf_counter()
    table = AnnotationTable()
    judge = partial(_run_subject, table, safeguards or Safeguards())
    table.subjects = sum(1 for _ in run_rows(subjects, judge, lambda subject: progress(subject.name)))
    table.seconds = time.perf_counter() - started
    return table


def _run_subject(table: AnnotationTable, safeguards: Safeguards, subject: SampledCall) -> None:
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
