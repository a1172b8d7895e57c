"""Partial sums that pass through an operator whose annotation does not say so.

They are derived by numbers and then tested like any claim. They are no claim of the user's, so that what does not hold
is left out.
"""

from __future__ import annotations

import time
from dataclasses import replace

from nnscaler.errors import NnscalerError
from verify.evidence.oracle.check import as_check, check_target
from verify.evidence.oracle.enumerate import Base, Enumerator, Unusable, bases
from verify.evidence.oracle.outcome import TargetOutcome
from verify.evidence.oracle.runner import Runner, WholeRaised
from verify.operators.suggest.linear import derive_linear
from verify.operators.verification import Verification
from verify.results.report import Check


def add_derived(verification: Verification) -> None:
    """Adds the partial sums that pass through a user's operator which passed its tests, and declares none."""
    options, found = verification.options, verification.tested
    wanted = options.explain and options.cases is None and verification.spec.target is not None
    if not wanted or not found or verification.findings or any(base.linear for base in found):
        return
    check, notes = derived_linear(verification.runner, found[0])
    verification.checks += [check] if check is not None else []
    verification.notes.update(dict.fromkeys(notes))


def derived_linear(runner: Runner, base: Base) -> tuple[Check | None, list[str]]:
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
        other = Runner(replace(runner.spec, linear=(slots,)), runner.options, runner.progress)
        try:
            outcome = check_target(Enumerator(other, bases(other)[0]), slots)
        except (Unusable, WholeRaised, NnscalerError, IndexError):
            continue
        if outcome.failures or not outcome.cases:
            continue
        holds.cases += outcome.cases
        holds.count += outcome.count
        notes.append(f"partial sums pass through `{runner.spec.name}` in inputs {sorted(slots)} (derived and tested)")
    if not holds.count:
        return None, []
    check = as_check("partial sums, derived", holds, time.perf_counter() - started)
    return replace(check, supporting=True), notes
