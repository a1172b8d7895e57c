"""The one door from advice to the oracle: an annotation is only ever suggested after it went through here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from verify.evidence.inputs.concrete_call import with_tensors
from verify.evidence.inputs.find_operator import annotated
from verify.evidence.options import DRAWS, OpOptions
from verify.evidence.oracle.check import check_target
from verify.evidence.oracle.claims import Claimed, claims_of, untested
from verify.evidence.oracle.enumerate import Enumerator, Unusable, bases
from verify.evidence.oracle.outcome import TargetOutcome
from verify.evidence.oracle.runner import Runner
from verify.operators.suggest.derived import add_derived
from verify.operators.suggest.probe_call import Question
from verify.operators.verification import verify_record
from verify.results.report import Report
from verify.results.verdict import Verdict

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
    runner = Runner(spec, replace(options or OpOptions(), prove=False))
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
