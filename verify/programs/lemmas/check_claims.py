"""Test, then prove, the claims about one call.

A test is exact: small whole numbers in float64, outputs and gradients under random cotangents, deliberately wrong
variants told apart. A proof only ever strengthens what has passed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch

from op_registry.errors import AnnotationError
from op_registry.spec import Refusal

from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.runtime.tensor_bits_and_differences import largest
from verify.evidence.dimension_types.localize_hooks_on_irregular_shards import composes, left_alone
from verify.evidence.dimension_types.prove import NO_GRADIENT
from verify.evidence.oracle.case_runner import CaseResult, WholeRaised
from verify.evidence.oracle.check_by_cases import TargetOutcome, as_check, one_way, run_cases
from verify.evidence.oracle.enumerate_cases import USERS_LOW, Base, Target
from verify.evidence.oracle.findings_from_counter_examples import refuted_by_proof, wrong_linear, wrong_split
from verify.evidence.oracle.search_decision_boundaries import ValueSearch, has_own_values
from verify.evidence.prove_tested_claims import prove_base
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import DRAWS, Kind
from verify.programs.lemmas.operator_claims_without_sizes import Claim, Passes, RunsWhole, Splits, Together
from verify.programs.lemmas.small_call import FREE, Representative, represent
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.results.finding import Finding
from verify.results.verdict import Condition, Strength, Verdict

KINDS: tuple[Kind, ...] = ("integers", "normal", "sparse", "positive", "integers", "normal", "given", "definite")
AGAIN, NEXT = 3, 101  # representative calls that are tried, and how far their seeds are apart
PARTS = (2, 3, 4)
MESH = (3, 2)  # of a case with two axes
EVEN, ODD = 24, 13  # of what is split while something goes around: two blocks in 2, 3 and 4 parts, or unequal ones


@dataclass(frozen=True)
class Evidence:
    """The verdict on one claim.

    blocker     why the verdict is not a stronger one
    count       tensors that were compared
    open        not everything has been tried yet (a proof, at least); another run can continue
    conditions  on sizes, under which it is what it is
    """

    verdict: Verdict
    blocker: str = ""
    count: int = 0
    finding: Finding | None = None
    open: bool = False
    conditions: tuple[Condition, ...] = ()


@dataclass
class ClaimedCall:
    """One representative call and what is claimed of it. `strided`: identifiers that plans split so."""

    small: Representative
    claims: dict[Claim, None] = field(default_factory=dict)
    strided: set[str] = field(default_factory=set)


def test(subject: ClaimedCall, claim: Claim) -> Evidence:
    """Run cases of the claim. TESTED at best, and then open."""
    small = subject.small
    started = time.perf_counter()
    outcome = TargetOutcome()
    try:
        for small, inputs in _inputs(subject, claim):
            assert small.signature.spec is not None
            run_cases(small.runner, _cases(claim, inputs, subject.strided), outcome)
            if outcome.failures or (outcome.count and not outcome.survived(DRAWS)):
                break
        if small.runner.spec.target is not None and not outcome.failures:
            _run_narrower(subject, claim, outcome)
    except (AnnotationError, Refusal) as error:
        return Evidence(Verdict.INCONCLUSIVE, first_line(error))
    check = as_check(str(claim), outcome, time.perf_counter() - started)
    if outcome.failures:
        return Evidence(Verdict.REFUTED, "", outcome.count, _finding(small, outcome.failures[0]))
    reason = "" if check.verdict.passes else check.detail or "its results are not finite, or zeros only"
    return Evidence(check.verdict, reason, outcome.count, open=check.verdict.passes)


def test_choices(small: Representative, splits: Mapping[str, int], others: Sequence[Choice] = ()) -> Evidence:
    """Run the choices of a program on one call.

    splits  identifier -> number of shards, over all axes that split it
    others  choices that split nothing
    """
    pairs = list(splits.items())
    meshes = [pairs[i : i + 2] for i in range(0, len(pairs), 2)]
    sizes = small.signature.bound.sizes if small.signature.bound is not None else {}
    outcome = TargetOutcome()
    started = time.perf_counter()
    for inputs in _draws(small):
        cases = [SplitCase(inputs, (choice,), (PARTS[0],)) for choice in others]
        for mesh in meshes:
            uneven = any(sizes.get(name, 0) % count for name, count in mesh)
            names, counts = tuple(Split(name) for name, _ in mesh), tuple(count for _, count in mesh)
            if uneven:  # of one axis each
                cases += [SplitCase(inputs, (n,), (c,), uneven=True) for n, c in zip(names, counts, strict=True)]
            else:
                cases.append(SplitCase(inputs, names, counts))
        run_cases(small.runner, cases, outcome)
        if outcome.failures:
            return Evidence(Verdict.REFUTED, "", outcome.count, _finding(small, outcome.failures[0]))
    check = as_check("choices", outcome, time.perf_counter() - started)
    return Evidence(check.verdict, "" if check.verdict.passes else check.detail, outcome.count)


def _inputs(subject: ClaimedCall, claim: Claim) -> Iterator[tuple[Representative, Inputs]]:
    """Yield inputs of one representative call, and then of others: what no kind of input draws anew, such as the places
    of labels, may make a wrong variant look right."""
    small = _sized(subject.small, claim)
    for number in range(AGAIN):
        if number:
            try:
                small = _sized(represent(subject.small.signature, small.inputs.seed + NEXT), claim)
            except Unrepresented:
                return
        for inputs in _draws(small):
            yield small, inputs


def _sized(small: Representative, claim: Claim) -> Representative:
    """Return a representative in which what is split divides by 6."""
    bound = small.signature.bound
    names = [claim.identifier] if isinstance(claim, Splits) else []
    names = list(dict.fromkeys(claim.identifiers)) if isinstance(claim, Together) else names
    twice = isinstance(claim, Together) and len(names) == 1
    if bound is None or small.samples:
        return small
    if all(bound.sizes.get(n, 0) % (FREE[0] if twice else FREE[1]) == 0 for n in names):
        return small
    try:
        return represent(small.signature, small.inputs.seed, tuple(names))
    except Unrepresented:
        return small


def _draws(small: Representative) -> Iterator[Inputs]:
    """Yield inputs on which the whole operator shows something; what is always zero is meant so, of a built-in
    operator."""
    zeros: list[Inputs] = []
    found = 0
    for number, kind in enumerate(KINDS):
        inputs = replace(small.inputs, kind=kind, seed=(small.inputs.seed * 1000 + number) % 2**62)
        try:
            whole = small.runner.prepare(inputs).whole
        except WholeRaised:
            continue
        if whole.finite and whole.shows_something:
            found += 1
            yield inputs
        elif whole.finite:
            zeros.append(inputs)
        if found == DRAWS:
            return
    if not found and small.runner.spec.target is None:
        yield from zeros[:DRAWS]


def _run_narrower(subject: ClaimedCall, claim: Claim, outcome: TargetOutcome) -> None:
    """Run a user's operator in narrower dtypes too, where it runs in them: it may do something else there."""
    small = _sized(subject.small, claim)
    for inputs in [*islice(_draws(small), 2)][-1:]:  # the second, as that is not of whole numbers, or the only one
        count = len(small.runner.concrete(inputs).tensors)
        scaled = [replace(inputs, factors=(factor,) * count + (1.0,)) for factor in _SMALLER]
        for dtype in USERS_LOW:
            tried = (replace(narrower, dtype=dtype) for narrower in (inputs, *scaled))
            narrower = next((one for one in tried if _has_room(small, one, getattr(torch, dtype))), None)
            if narrower is not None:
                run_cases(small.runner, _cases(claim, narrower, subject.strided), outcome)


_SMALLER = (0.1, 0.01)  # of the values of a draw, where results leave the range of a narrow dtype
_ROOM = 64.0  # how many times larger the results of shards may be, and what lies between


def _has_room(small: Representative, inputs: Inputs, dtype: torch.dtype) -> bool:
    """Return whether the whole runs, and its results are far from the end of the dtype's range."""
    try:
        whole = small.runner.prepare(inputs).whole
    except (WholeRaised, AnnotationError):
        return False
    results = [t for t in (*whole.outputs, *whole.gradients) if t is not None and t.numel()]
    return whole.finite and all(largest(t) * _ROOM <= torch.finfo(dtype).max for t in results)


def _cases(claim: Claim, inputs: Inputs, strided: set[str]) -> Iterator[SplitCase]:
    inputs = _cut_alike(claim, inputs)
    if isinstance(claim, Together):
        (first, second), (one, other) = claim.pair
        outer = 2 if first == second else 1
        inside = Split(second, circulating=other, prefix=second in claim.prefix)
        yield SplitCase(inputs, (Split(first, outer, circulating=one, prefix=first in claim.prefix), inside), MESH)
        return
    if isinstance(claim, Splits) and claim.uneven:
        split = Split(claim.identifier, circulating=claim.circulating, prefix=claim.prefix)
        for parts in PARTS:
            yield SplitCase(inputs, (split,), (parts,), uneven=True)
        return
    for choice in _choices(claim, strided):
        for parts in PARTS if isinstance(claim, Splits) else PARTS[:2]:
            yield SplitCase(inputs, (choice,), (parts,))


def _cut_alike(claim: Claim, inputs: Inputs) -> Inputs:
    """Return inputs in which what goes around has the size of what is split: one axis cuts both alike."""
    alike = {name for s in _alone(claim) if s.circulating for name in (s.identifier, s.circulating)}
    size = ODD if isinstance(claim, Splits) and claim.uneven else EVEN
    return replace(inputs, sizes=tuple((name, size) for name in sorted(alike))) if alike else inputs


def _choices(claim: Claim, strided: set[str]) -> tuple[Choice, ...]:
    match claim:
        case Splits(identifier, prefix=True):
            return (Split(identifier, prefix=True),)
        case Splits(identifier, _, around):
            outers = (1, 2) if identifier in strided else (1,)
            return tuple(Split(identifier, outer, circulating=around) for outer in outers)
        case Passes(slots):
            return (RunPartial(slots),)
        case RunsWhole(equal=True):
            return (RunInvariant(),)
    return (RunInvariant(), RunReplicated())


def _finding(small: Representative, failed: CaseResult) -> Finding:
    spec = small.runner.spec
    if any(isinstance(c, RunPartial) for c in failed.case.choices):
        return wrong_linear(spec, failed)
    names = [choice.identifier for choice in failed.case.choices if isinstance(choice, Split)]
    if len(names) == len(failed.case.choices):
        marked = " and ".join(f"`{name}^`" for name in dict.fromkeys(names))
        place = spec.name if spec.where is None else f"{Path(spec.where.file).name}::{spec.name}"
        help = f"freeze it ({marked}), or see what else holds: nnscaler verify-op {place}"
        return replace(wrong_split(spec, failed), help=help)
    message = f"`{spec.name}`, run whole on every rank, does not give every rank what the whole gives"
    cause = "its backward is not linear in the gradient that it is given, or copies of it do not agree"
    facts = {"shapes": ", ".join(str(t.shape) for t in failed.signature.call.tensors())}
    return Finding("annotation_wrong", message, spec.where, facts, cause)


def prove(subject: ClaimedCall, tested: Mapping[Claim, Evidence], deadline: float) -> dict[Claim, Evidence]:
    """Return the evidence after the proofs that are open.

    All claims about one call share its trace. `deadline`: of `time.thread_time`; what is not proved by then stays open.
    """
    small = subject.small
    undecided = [c for c in subject.claims if tested[c].verdict.passes and tested[c].open]
    wanted = {_target(c): c for c in undecided if isinstance(c, Passes) or (isinstance(c, Splits) and c.by_one_shard)}
    leaders = tuple(t for t in wanted if isinstance(t, str))
    linear = tuple(t for t in wanted if isinstance(t, frozenset))
    base = Base(small.inputs, small.signature, leaders, linear)
    found = {c: replace(e, open=e.open and not e.verdict.passes) for c, e in tested.items()}
    if small.runner.spec.random:
        found = {c: replace(e, blocker=e.blocker or "it draws random numbers") for c, e in found.items()}
    elif wanted:
        for target, strength in prove_base(small.runner, base, deadline).items():
            claimed = wanted[target]
            found[claimed] = replace(_strengthened(small, claimed, tested[claimed], strength), open=strength.open)
    for claim in undecided:
        if any(s.circulating for s in _alone(claim)):
            found[claim] = replace(found[claim], blocker="its ranks communicate, and were run", open=False)
            continue
        if isinstance(claim, Splits) and claim.prefix:
            found[claim] = replace(found[claim], blocker="its call has what is before a slice: that is tested only")
        elif isinstance(claim, Splits) and claim.uneven:
            found[claim] = _unevenly(small, claim, found)
        elif isinstance(claim, Together):
            found[claim] = _composed(small, claim, found)
        else:
            continue
        leant_on = [found[s] for s in _alone(claim) if s in found]
        found[claim] = replace(found[claim], open=any(e.open for e in leant_on))
    return {c: _on_more_values(subject, c, e) if c in undecided else e for c, e in found.items()}


def _on_more_values(subject: ClaimedCall, claim: Claim, found: Evidence) -> Evidence:
    """Run a user's operator on both sides of whatever it decides by values, where that is not proved for all."""
    small = _sized(subject.small, claim)
    spec = small.runner.spec
    if found.verdict is not Verdict.TESTED_EXACT or not has_own_values(spec):
        return found
    search = ValueSearch(small.runner, lambda inputs: _cases(claim, inputs, subject.strided))
    search.all_of(_cut_alike(claim, small.inputs))
    if search.outcome.failures:
        finding = _finding(small, search.outcome.failures[0])
        return replace(found, verdict=Verdict.REFUTED, blocker="", finding=finding, open=False)
    if search.outcome.unseen:
        return replace(found, verdict=Verdict.INCONCLUSIVE, blocker=one_way(search.outcome.unseen), open=False)
    return replace(found, count=found.count + search.outcome.count)


def _alone(claim: Claim) -> tuple[Splits, ...]:
    """Return the splits into equal pieces, each by one axis, of which a claim is one."""
    if isinstance(claim, Together):
        return claim.alone
    return (replace(claim, uneven=False),) if isinstance(claim, Splits) else ()


def _target(claim: Splits | Passes) -> Target:
    return claim.identifier if isinstance(claim, Splits) else claim.slots


def _strengthened(small: Representative, claim: Claim, tested: Evidence, strength: Strength) -> Evidence:
    if strength.verdict is Verdict.REFUTED:
        assert strength.counter_example is not None and small.signature.bound is not None
        text = small.signature.bound.text
        finding = refuted_by_proof(small.runner.spec, str(claim), text, strength.counter_example)
        return replace(tested, verdict=Verdict.REFUTED, finding=finding)
    if small.other_numbers and strength.verdict is not Verdict.TESTED_EXACT:
        bounded = Verdict.TESTED_EXACT if small.samples else Verdict.PROVED_BOUNDED
        blocker = "it was looked at with other numbers among its arguments"
        return replace(tested, verdict=bounded, blocker=blocker, conditions=strength.conditions)
    conditions = strength.conditions
    if strength.verdict is Verdict.PROVED_BOUNDED and strength.reason == str(NO_GRADIENT):
        return replace(tested, verdict=Verdict.PROVED_ALL_SIZES)
    reason = strength.reason
    if not strength.blocker and len(conditions) > 1:
        reason = f"it takes for granted that {conditions[0]}, and {len(conditions) - 1} more relations of sizes"
    return replace(tested, verdict=strength.verdict, blocker=reason, conditions=conditions)


def _unevenly(small: Representative, claim: Splits, found: Mapping[Claim, Evidence]) -> Evidence:
    """Derive the evidence for unequal shards from the proof for equal ones.

    A proof for all sizes holds for unequal shards too, unless a hook rewrites the call.
    """
    equal = found.get(Splits(claim.identifier))
    if not left_alone(small.signature, claim.identifier):
        return replace(found[claim], blocker="its call is rewritten for shards, and unequal ones are tested only")
    if equal is None or equal.verdict is not Verdict.PROVED_ALL_SIZES:
        return replace(found[claim], blocker="it is not proved of equal shards of all sizes")
    return replace(found[claim], verdict=equal.verdict, blocker=equal.blocker)


def _composed(small: Representative, claim: Together, found: Mapping[Claim, Evidence]) -> Evidence:
    """Derive the evidence for two splits at once from that for each alone, where a shard's call is
    made axis by axis."""
    first, second = claim.identifiers
    alone = [found[s] for s in claim.alone]
    weakest = max(alone, key=lambda e: e.verdict.rank)
    if small.runner.spec.random:
        return found[claim]
    if not composes(small.signature, first, second):
        return replace(found[claim], blocker="its call is rewritten for both axes at once")
    return replace(found[claim], verdict=weakest.verdict, blocker=weakest.blocker)
