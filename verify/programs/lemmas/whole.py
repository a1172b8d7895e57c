"""Operators that every rank of an axis runs whole.

Every rank computes the same function of equal inputs, so that values are equal. What gradients are is by the choice:

* `RunInvariant`: cotangents are equal on all ranks, so that gradients are.
* `RunReplicated`: the cotangents of the ranks add up to the whole's. A vector-Jacobian product is linear in the
  cotangent, so that the gradients of the ranks add up to the whole's gradient.

For torch's own operators both hold by construction, for all sizes: they are functions of their arguments, and their
derivatives are linear in the cotangent. Two kinds of operators need more than that sentence:

* One that draws random numbers is a function of its inputs and of the draws. The runtime's own draw by operation, step
  and logical coordinate; that a program asks them to is for the check of the program. An operator of torch that can
  draw from torch's generator (attention, with dropout) is looked at as it is called.
* A user's operator may draw, count its calls, or change its inputs; and a backward written by hand may be anything (it
  may clip the gradient that it is given). It is run, audited, and its backward traced: partial sums of cotangents have
  to become partial sums of gradients by the rules of each operator in the trace.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx.experimental._config as symbolic_config

from nnscaler.errors import NnscalerError
from verify.evidence.dimension_types.guards import granted
from verify.evidence.dimension_types.interpret import interpret
from verify.evidence.dimension_types.states import PARTIAL_SUM, SAME, PartialSum, State, Unknown, Zero
from verify.evidence.dimension_types.symbolic import make_symbolic, quiet
from verify.evidence.dimension_types.trace import record, simplified
from verify.evidence.inputs.concrete_call import function_of
from verify.operators.audit.side_effects import audit
from verify.programs.lemmas.check_claims import ClaimedCall, Evidence, test
from verify.programs.lemmas.representative import Representative
from verify.programs.lemmas.statement import RunsWhole
from verify.results.catalogue import INCOMPARABLE
from verify.results.verdict import Verdict

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


def look_at(subject: ClaimedCall) -> Evidence:
    """Return the evidence for an operator of which nothing is known: audited, tested, and its backward followed."""
    small = subject.small
    spec = small.runner.spec
    call = small.runner.concrete(small.inputs)
    if not spec.random:
        probed = audit(spec, call, small.inputs.seed, strides=False, function=small.runner.function(call))
        hidden = next((f for f in probed.findings if f.code in INCOMPARABLE), None)
        if hidden is not None:
            return Evidence(Verdict.REFUTED, "", 1, hidden)
    tested = replace(test(subject, RunsWhole()), open=False)
    if not tested.verdict.passes or spec.random:
        return replace(tested, blocker=tested.blocker or "it draws random numbers")
    blocker, conditions = _followed(small)
    if blocker:
        return replace(tested, blocker=blocker)
    if small.signature.bound is not None and not small.signature.bound.sizes:
        conditions = (*conditions, "it has no annotation, and was looked at with the program's sizes")
    if small.other_numbers:
        conditions = (*conditions, "it was looked at with other numbers among its arguments")
    if conditions:
        return replace(tested, verdict=Verdict.PROVED_BOUNDED, blocker="; ".join(conditions))
    return replace(tested, verdict=Verdict.PROVED_ALL_SIZES)


def _followed(small: Representative) -> tuple[str, tuple[str, ...]]:
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
            return f"the gradient of input {i} is not followed to be linear: {reason}", ()
    return "", conditions
