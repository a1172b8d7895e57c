"""Find splits that hold and that the annotation does not claim: partial sums that pass through, dims frozen without
need.

Both are derived by numbers and then tested like any claim; neither is a claim of the user's, so that what does not hold
is left out.
"""

from __future__ import annotations

import time
from dataclasses import replace

from nnscaler.errors import NnscalerError
from verify.op_advice.linear import derive_linear
from verify.op_advice.widen import widen
from verify.op_checks.check import as_check, check_target
from verify.op_checks.enumerate import Base, Enumerator, Unusable, bases
from verify.op_checks.outcome import Outcome
from verify.op_checks.runner import Runner, WholeRaised
from verify.report import Check


def derived_linear(runner: Runner, base: Base) -> tuple[Check | None, list[str]]:
    """Return the sets of inputs through which partial sums pass, of an operator that declares none; no check without
    any."""
    started = time.perf_counter()
    try:
        call = runner.concrete(base.inputs)
        found = derive_linear(runner.function(call), call)
    except Exception:  # noqa: BLE001 - it runs as the annotation has it; what it does on other tensors is no claim
        return None, []
    holds = Outcome()
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


def wider(runner: Runner) -> list[str]:
    """Return notes on frozen identifiers that could be split; every annotation in them was tested."""
    found = widen(runner.spec, runner.options)
    return [f'{advice.sentence}: "{advice.text}" holds (tested)' for advice in found]
