"""Ask the oracle about an annotation before it is suggested: all advice does so here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from verify.evidence.inputs.concrete_call import with_tensors
from verify.evidence.inputs.find_operator import annotated
from verify.evidence.oracle.annotation_claims import Claimed, claims_of, untested
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.check_by_cases import TargetOutcome, as_check, check_target
from verify.evidence.oracle.enumerate_cases import Base, Enumerator, Unusable, bases
from verify.evidence.oracle.search_decision_boundaries import try_values
from verify.evidence.verify_op_options import DRAWS, OpOptions
from verify.operators.all_checks import Verification, verify_record
from verify.operators.suggest.call_with_other_tensors_and_integers import Question
from verify.operators.suggest.find_linear_sets import derive_linear
from verify.results.report import Check, Report
from verify.results.verdict import TESTED, Verdict

FEW = 12  # cases of one identifier


def with_annotation(spec: OperatorSpec, text: str, questions: Sequence[Question] = ()) -> OperatorSpec:
    """Return the operator under another annotation; `questions` are its sample inputs, if there are any.

    Raises AnnotationError where the text breaks a rule of the language.
    """
    if questions:
        calls = [_sample(question) for question in questions]
        spec = replace(spec, sample_inputs=lambda: calls)
    return annotated(spec, text)


def _sample(question: Question) -> Any:
    call = question.concrete.call
    args, kwargs = with_tensors(call, question.tensors, {})
    return {**dict(zip(question.names, args, strict=False)), **kwargs} if kwargs else tuple(args)


def report_on(spec: OperatorSpec, options: OpOptions | None = None) -> Report:
    """Verify the operator as verify-op does: first on a few cases, and on all of them where these decide nothing.

    Nothing is proved: that takes longer than a suggestion may.
    """
    plain = replace(options or OpOptions(), prove=False, suggest=False)
    report = verify_record(spec, replace(plain, cases=FEW))
    return verify_record(spec, plain, advise=add_derived) if report.verdict is Verdict.INCONCLUSIVE else report


def claims_hold(spec: OperatorSpec, names: Sequence[str], options: OpOptions | None = None) -> bool:
    """Return whether splits of these identifiers (`*`: of all its dims) pass on every sample that has them.

    False where some claim about one of them was not compared at all.
    """
    outcomes: dict[str, TargetOutcome] = {}
    claimed: list[Claimed] = []
    runner = OperatorRunner(spec, replace(options or OpOptions(), prove=False))
    wanted = set(names)
    try:
        for base in bases(runner):
            bound = base.signature.bound
            assert bound is not None
            for leader in base.leaders:
                if wanted & {"*" if n.startswith("*") else n for n in bound.tied.get(leader, (leader,))}:
                    outcome = outcomes.setdefault(leader, TargetOutcome())
                    check_target(Enumerator(runner, base), leader, outcome)
                    claimed += claims_of(base.signature, [leader], runner.options.safeguards)
                    if outcome.failures:
                        return False
    except (Unusable, AnnotationError, NnscalerError):
        return False
    exercised = {claim for outcome in outcomes.values() for claim in outcome.exercised}
    declined = {claim for outcome in outcomes.values() for claim in outcome.declined}
    shown = all(o.count and not o.survived(DRAWS) for o in outcomes.values())
    return bool(outcomes) and shown and not untested(claimed, exercised, declined)


# Partial sums that pass through an operator whose annotation does not say so.
# They are derived by numbers and then tested like any claim. They are no claim of the user's, so that what does not
# hold is left out.


def add_derived(verification: Verification) -> None:
    """Adds the partial sums that pass through a user's operator which passed its tests, and declares none."""
    options, found = verification.options, verification.tested
    wanted = options.explain and options.cases is None and verification.spec.target is not None
    if not wanted or not found or verification.findings or any(base.linear for base in found):
        return
    check, notes = derived_linear(verification.runner, found[0])
    verification.checks += [check] if check is not None else []
    verification.notes.update(dict.fromkeys(notes))


def derived_linear(runner: OperatorRunner, base: Base) -> tuple[Check | None, list[str]]:
    """Return the sets of inputs through which partial sums pass, of an operator that declares none; no check without
    any."""
    started = time.perf_counter()
    try:
        call = runner.concrete(base.inputs)
        found = derive_linear(runner.function(call), call)
    except Exception:  # noqa: BLE001 - it runs as the annotation has it; what it does on other tensors is no claim
        return None, []
    holds = TargetOutcome()
    notes: list[str] = []
    for slots in found:
        other = OperatorRunner(replace(runner.spec, linear=(slots,)), runner.options, runner.progress)
        try:
            first = bases(other)[0]
            outcome = check_target(Enumerator(other, first), slots)
            outcome.add_beyond(TargetOutcome() if outcome.failures else try_values(other, first, slots, TESTED))
        except (Unusable, WholeRaised, NnscalerError, IndexError):
            continue
        if outcome.failures or outcome.unseen or not outcome.cases:
            continue
        holds.cases += outcome.cases
        holds.count += outcome.count
        notes.append(f"partial sums pass through `{runner.spec.name}` in inputs {sorted(slots)} (derived and tested)")
    if not holds.count:
        return None, []
    check = as_check("partial sums, derived", holds, time.perf_counter() - started)
    return replace(check, supporting=True), notes
