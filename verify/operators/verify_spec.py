"""The report on an operator: what the oracle says of it, with advice.

Advice asks the oracle and never the reverse; here the two meet. After the tests, a claim that was refuted gets an
annotation that holds, and an operator that passed is asked what it could do besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from op_registry.spec import OperatorSpec

from nnscaler.ir.placement import Split
from verify.evidence.options import OpOptions
from verify.evidence.oracle.findings import wrong
from verify.evidence.oracle.runner import CaseResult, OperatorRunner
from verify.operators.suggest.tested import add_derived
from verify.operators.suggest.widen import repair, widen
from verify.operators.verification import Reproduce, Verification, verify_record
from verify.results.finding import Finding
from verify.results.report import Report


def verify_spec(
    spec: OperatorSpec,
    options: OpOptions | None = None,
    reproduce: Reproduce | None = None,
    progress: Callable[[str], None] | None = None,
    runner: OperatorRunner | None = None,
) -> Report:
    """As `verify_op`, for an operator's record, in this process. The arguments are those of `verify_record`."""
    return verify_record(spec, options, reproduce=reproduce, progress=progress, runner=runner, advise=_advise)


def refutation(spec: OperatorSpec, result: CaseResult, options: OpOptions) -> Finding:
    """The finding of a counter-example, with the way out."""
    return _with_repair(wrong(spec, result), spec, result, options)


def _advise(verification: Verification) -> None:
    spec, options = verification.spec, verification.options
    for place, result in verification.counter_examples.items():
        verification.findings[place] = _with_repair(verification.findings[place], spec, result, options)
    add_derived(verification)
    if options.suggest and verification.tested and not verification.findings and spec.target is not None:
        wider = widen(spec, verification.runner.options)
        verification.notes.update(dict.fromkeys(f'{a.sentence}: "{a.text}" holds (tested)' for a in wider))


def _with_repair(finding: Finding, spec: OperatorSpec, result: CaseResult, options: OpOptions) -> Finding:
    """The finding with what to write instead, where one split was refuted."""
    choice = result.case.choices[0]
    if not isinstance(choice, Split) or len(result.case.choices) > 1 or not options.explain:
        return finding
    advice = repair(spec, choice.identifier, options)
    if advice is None:
        return finding
    said = "freeze it" if advice.freezes else "this annotation holds (tested)"
    return replace(finding, help=f'{said}: "{advice.text}"\n{advice.sentence}')
