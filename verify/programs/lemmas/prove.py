"""L1: the statements about operators that a proof of a program relies on, each looked at once.

Obligations that differ in sizes, ranks, layers, names or axes become the same lemmas. A plan of hundreds of layers on
thousands of ranks relies on some tens of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx.experimental._config as symbolic_config

from op_registry.call import DType, TensorArgument
from op_registry.spec import OperatorSpec

from nnscaler.errors import NnscalerError
from verify.evidence.dimension_types.check_size_guards_on_shards import granted
from verify.evidence.dimension_types.functional_trace import record, simplified
from verify.evidence.dimension_types.interpret import interpret
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import make_symbolic
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, PartialSum, State, Unknown, Zero
from verify.evidence.inputs.concrete_call import function_of
from verify.evidence.operator_trace import quiet
from verify.operators.audit.side_effects import ASKS_RANKS, audit
from verify.programs.lemmas import check_claims
from verify.programs.lemmas.check_claims import ClaimedCall, Evidence, test
from verify.programs.lemmas.operator_claims_without_sizes import Claim, RunsWhole, claims_of, is_users, strided
from verify.programs.lemmas.result import Lemma, LemmaResult, Memo
from verify.programs.lemmas.small_call import Representative, represent
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.programs.lemmas.user_operators_at_program_sizes import lemmas_at_sizes
from verify.programs.typing import Obligation
from verify.results.finding_codes import INCOMPARABLE
from verify.results.verdict import Condition, Verdict

# Operators that every rank of an axis runs whole.
# Every rank computes the same function of equal inputs, so that values are equal. What gradients are is by the
# choice:
# * `RunInvariant`: cotangents are equal on all ranks, so that gradients are. * `RunReplicated`: the cotangents of
# the ranks add up to the whole's. A vector-Jacobian product is linear in the cotangent, so that the gradients of
# the ranks add up to the whole's gradient.
# For torch's own operators both hold by construction, for all sizes: they are functions of their arguments, and
# their derivatives are linear in the cotangent. Two kinds of operators need more than that sentence:
# * One that draws random numbers is a function of its inputs and of the draws. The runtime's own draw by operation,
# step and logical coordinate; that a program asks them to is for the check of the program. An operator of torch
# that can draw from torch's generator (attention, with dropout) is looked at as it is called. * A user's operator
# may draw, count its calls, or change its inputs; and a backward written by hand may be anything (it may clip the
# gradient that it is given, or add one of its own). It is run, audited, and its backward traced: partial sums of
# cotangents have to become partial sums of gradients by the rules of each operator in the trace. Under `RunInvariant`
# it needs not be linear; then it is tested only.

SECONDS = 10.0  # of processor time, for one trace


def by_construction(operator: str) -> Evidence | None:
    """Return the evidence for an operator of torch's or of the runtime's own that draws no random numbers; None for any
    other one, which has to be looked at."""
    if operator.startswith("nnscaler."):
        return Evidence(Verdict.PROVED_ALL_SIZES)
    if not operator.startswith("aten."):
        return None
    try:
        tags = getattr(function_of(operator, None), "tags", ())
    except NnscalerError:  # not an operator of this version of torch
        return None
    return None if torch.Tag.nondeterministic_seeded in tags else Evidence(Verdict.PROVED_ALL_SIZES)


def look_at(subject: ClaimedCall, claim: RunsWhole) -> Evidence:
    """Return the evidence for an operator of which nothing is known: audited, tested, and its backward followed."""
    small = subject.small
    spec = small.runner.spec
    call = small.runner.concrete(small.inputs)
    if not spec.random:
        probed = audit(spec, call, small.inputs.seed, strides=False, function=small.runner.function(call))
        hidden = next((f for f in probed.findings if f.code in INCOMPARABLE), None)
        if hidden is not None:
            return Evidence(Verdict.REFUTED, "", 1, hidden)
        if any(f.code == ASKS_RANKS for f in probed.findings):
            return Evidence(Verdict.INCONCLUSIVE, "it asks torch.distributed, and was run as the only rank")
    tested = replace(test(subject, claim), open=False)
    if not tested.verdict.passes:
        return tested
    if spec.random:
        return replace(tested, blocker=tested.blocker or "it draws random numbers")
    blocker, conditions = _followed(small)
    if blocker:
        return replace(tested, blocker=blocker, conditions=conditions)
    reasons = [str(condition) for condition in conditions]
    if small.signature.bound is not None and not small.signature.bound.sizes:
        reasons.append("it has no annotation, and was looked at with the program's sizes")
    if small.other_numbers:
        reasons.append("it was looked at with other numbers among its arguments")
    if reasons:
        proved = replace(tested, verdict=Verdict.PROVED_BOUNDED, blocker="; ".join(reasons))
        return replace(proved, conditions=conditions)
    return replace(tested, verdict=Verdict.PROVED_ALL_SIZES)


def _followed(small: Representative) -> tuple[str, tuple[Condition, ...]]:
    """Explain why gradients are not known to be linear in cotangents, and name the assumptions about sizes."""
    signature = small.signature
    bound, spec = signature.bound, small.runner.spec
    assert bound is not None
    concrete = small.runner.prepare(small.inputs).whole.concrete
    try:
        with quiet(), symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            made = make_symbolic(signature, None, concrete.tensors, concrete.constants, frozenset(bound.sizes))
            trace = record(function_of(spec.name, spec), made, SECONDS)
            trace = simplified(trace, made.world.shape_env.replacements)
            given: dict[int, State] = dict.fromkeys(trace.inputs, SAME)
            given.update({number: PARTIAL_SUM for number in trace.cotangents if number is not None})
            known = interpret(trace, given, frozenset())
            names = {symbol: name for name, symbol in made.world.symbols.items()}
            conditions = granted(made.world.shape_env, frozenset(), names).conditions
    except Exception as error:  # noqa: BLE001 - whatever the operator raises on fake tensors, nothing is proved
        return f"its trace raises {type(error).__name__}", ()
    for i, number in enumerate(trace.gradients):
        state = known.get(number) if number is not None else None
        if number is not None and not isinstance(state, PartialSum | Zero):
            reason = state.reason if isinstance(state, Unknown) else str(state)
            return f"the gradient of input {i} is not followed to be linear: {reason}", conditions
    return "", conditions


@dataclass
class _CallForm:
    """Calls of one form. `small` is None where the claims need no call (`reason` empty) or there is none."""

    operator: str
    text: str
    spec: OperatorSpec | None
    small: Representative | None
    reason: str = ""
    uses: dict[Claim, int] = field(default_factory=dict)
    strided: set[str] = field(default_factory=set)
    examples: dict[Claim, str] = field(default_factory=dict)
    obligations: dict[int, Obligation] = field(default_factory=dict)  # by id

    def add(self, claim: Claim, obligation: Obligation) -> None:
        self.uses[claim] = self.uses.get(claim, 0) + obligation.uses
        self.examples.setdefault(claim, obligation.example)
        self.strided |= strided(obligation)
        self.obligations[id(obligation)] = obligation


def prove_obligations(
    obligations: Sequence[Obligation], *, seconds: float, memo: Memo | None = None, seed: int = 0
) -> LemmaResult:
    """Test every lemma that the obligations rely on, and prove what can be proved.

    `seconds`: of this thread's processor time, so that other work on the machine changes no verdict. What is not tested
    by then is INCONCLUSIVE, what is not proved is TESTED. `memo`: evidence of earlier calls; it is given each piece of
    new evidence at once, so that a call after one that was cut short goes on from there. Does not raise for what is
    wrong with an operator.
    """
    started = time.perf_counter()
    forms = _forms(obligations, seed)
    subjects = [ClaimedCall(form.small, dict.fromkeys(form.uses), form.strided) for form in forms if form.small]
    found = _gather(subjects, seconds, memo or Memo())
    lemmas: list[Lemma] = []
    for form in forms:
        known = found[id(form.small)] if form.small is not None else {}
        lemmas += [_lemma(form, claim, known) for claim in form.uses]
        if is_users(form.spec):
            lemmas += (
                lemma for o in form.obligations.values() for lemma in lemmas_at_sizes(o, form.small, known, seed)
            )
    return LemmaResult(tuple(lemmas), len(obligations), time.perf_counter() - started)


def _gather(subjects: Sequence[ClaimedCall], seconds: float, memo: Memo) -> dict[int, Mapping[Claim, Evidence]]:
    """Gather the evidence by the representative's id: all tests first, then proofs while there is time."""
    deadline = time.thread_time() + seconds
    found: dict[int, Mapping[Claim, Evidence]] = {}
    open_: list[tuple[ClaimedCall, dict[Claim, Evidence]]] = []
    for subject in subjects:
        known = dict(memo.known(subject))
        found[id(subject.small)] = known
        missing = [claim for claim in subject.claims if claim not in known]
        if missing:
            with memo.watching(subject):
                for claim in missing:
                    known[claim] = _tested(subject, claim, deadline, seconds)
            memo.keep(subject, known)
        if any(e.open for e in known.values()):
            open_.append((subject, known))
    for subject, tested in open_:
        with memo.watching(subject):
            proved = check_claims.prove(subject, tested, deadline)
        found[id(subject.small)] = memo.keep(subject, proved)
    return found


def _tested(subject: ClaimedCall, claim: Claim, deadline: float, seconds: float) -> Evidence:
    if time.thread_time() > deadline:
        reason = f"the limit of {seconds:g} s of processor time was reached before it was tested"
        return Evidence(Verdict.INCONCLUSIVE, reason, open=True)
    return look_at(subject, claim) if isinstance(claim, RunsWhole) else check_claims.test(subject, claim)


def _forms(obligations: Sequence[Obligation], seed: int) -> list[_CallForm]:
    """Return the obligations by the form of their call: small representatives that are equal are one form."""
    by_call: dict[object, _CallForm] = {}
    by_form: dict[object, _CallForm] = {}
    for obligation in obligations:
        signature = obligation.signature
        call, spec = signature.call, signature.spec
        claims = list(claims_of(obligation))
        if spec is not None and (is_users(spec) or spec.random) and RunsWhole() not in claims:
            claims.append(RunsWhole(is_users(spec)))  # a function of its inputs is what every claim is about
        for claim in dict.fromkeys(claims):
            constructed = isinstance(claim, RunsWhole) and _by_construction(obligation) is not None
            key = call.operator if constructed else repr((call, id(spec), signature.bound and signature.bound.text))
            if key not in by_call:
                made = _CallForm(call.operator, "", spec, None) if constructed else _form(obligation, seed)
                by_call[key] = by_form.setdefault(_key(made), made)
            by_call[key].add(claim, obligation)
    return list(by_form.values())


def _by_construction(obligation: Obligation) -> Evidence | None:
    spec = obligation.signature.spec
    if is_users(spec) or (spec is not None and spec.random):
        return None
    return by_construction(obligation.signature.call.operator)


def _form(obligation: Obligation, seed: int) -> _CallForm:
    signature = obligation.signature
    text = signature.bound.text if signature.bound is not None else ""
    try:
        small = represent(signature, seed)
    except Unrepresented as error:
        return _CallForm(signature.call.operator, text, signature.spec, None, f"no small call of it runs: {error}")
    return _CallForm(signature.call.operator, text, signature.spec, small)


def _key(form: _CallForm) -> object:
    if form.small is None:
        return form.operator, form.text, id(form.spec), form.reason
    return form.small.form, form.text, id(form.spec)


def _lemma(form: _CallForm, claim: Claim, known: Mapping[Claim, Evidence]) -> Lemma:
    found = known.get(claim)
    if found is None and form.reason:
        found = Evidence(Verdict.INCONCLUSIVE, form.reason)
    elif found is None:
        found = by_construction(form.operator) or Evidence(Verdict.INCONCLUSIVE, "nothing is known of it")
    annotated = f" (`{form.text}`)" if form.text else ""
    return Lemma(
        f"`{form.operator}`{annotated} {claim}",
        form.operator,
        _called(form),
        found.verdict,
        found.blocker,
        form.uses[claim],
        form.examples[claim],
        found.count,
        found.finding,
        form.spec.where if form.spec is not None else None,
        found.open,
    )


def hangs_on_sizes(found: LemmaResult) -> str:
    """Return the first lemma of a user's operator that passes, and is not proved for all sizes; empty where none is
    so."""
    users = (lemma for lemma in found.lemmas if lemma.strength.passes and lemma.where is not None)
    return next((str(lemma) for lemma in users if lemma.strength is not Verdict.PROVED_ALL_SIZES), "")


def _called(form: _CallForm) -> str:
    """Describe the operator's call, at small sizes."""
    if form.small is None:
        return form.operator

    def shown(value: object) -> str:
        if isinstance(value, TensorArgument):
            return str(list(value.shape))
        if isinstance(value, DType):
            return value.name
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(shown, value)) + "]"
        return repr(value)

    call = form.small.signature.call
    given = [*map(shown, call.args), *(f"{key}={shown(value)}" for key, value in call.kwargs.items())]
    return f"{call.operator}({', '.join(given)})"
