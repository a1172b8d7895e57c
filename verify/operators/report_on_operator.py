"""The report on an operator: what the oracle says of it, with advice.

Advice asks the oracle and never the reverse; here the two meet. After the tests, a claim that was refuted gets an
annotation that holds, and an operator that passed is asked what it could do besides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_placement import Split
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner
from verify.evidence.oracle.findings_from_counter_examples import wrong
from verify.evidence.verify_op_options import OpOptions
from verify.operators.all_checks import Reproduce, Verification, verify_record
from verify.operators.suggest.ask_oracle import add_derived, claims_hold, with_annotation
from verify.operators.suggest.repair_annotation import Advice, frozen, plain_name, repair, widen, without_slices
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
    finding, advice = wrong(spec, result), _repair(spec, result, options)
    return finding if advice is None else _with_advice(finding, advice)


def _advise(verification: Verification) -> None:
    spec, options = verification.spec, verification.options
    found: dict[int, tuple[str, Advice]] = {}  # of a finding, the identifier and what to write instead
    repaired = spec
    for place, result in verification.counter_examples.items():
        split, advice = result.case.choices[0], _repair(repaired, result, options)
        if isinstance(split, Split) and advice is not None:
            found[place] = (split.identifier, advice)
            repaired = with_annotation(spec, advice.text)
    whole = _together(spec, repaired, found.values(), options) if len(found) > 1 else None
    for place, (_, advice) in found.items():
        verification.findings[place] = _with_advice(verification.findings[place], advice, whole)
    add_derived(verification)
    if options.suggest and verification.tested and not verification.findings and spec.target is not None:
        wider = widen(spec, verification.runner.options)
        verification.notes.update(dict.fromkeys(f'{a.sentence}: "{a.text}" holds (tested)' for a in wider))


def _repair(spec: OperatorSpec, result: CaseResult, options: OpOptions) -> Advice | None:
    """Return what to write instead, where one split was refuted."""
    choice = result.case.choices[0]
    if not isinstance(choice, Split) or len(result.case.choices) > 1 or not options.explain:
        return None
    return without_slices(spec, choice.identifier) if choice.prefix else repair(spec, choice.identifier, options)


def _together(
    spec: OperatorSpec, repaired: OperatorSpec, found: Collection[tuple[str, Advice]], options: OpOptions
) -> str:
    """Return one annotation for all that was refuted: that of all repairs if it holds, else all of them frozen."""
    names = tuple(plain_name(name) for name, advice in found if not advice.freezes)
    assert isinstance(spec.annotation, str) and isinstance(repaired.annotation, str)
    if names and claims_hold(repaired, names, options):
        return f'with the others that are refuted, this annotation holds (tested): "{repaired.annotation}"'
    text = spec.annotation
    for name, _ in found:
        text = frozen(text, plain_name(name))
    return f'with the others that are refuted, freeze it: "{text}"'


def _with_advice(finding: Finding, advice: Advice, whole: str | None = None) -> Finding:
    if whole is None:
        whole = f'{"freeze it" if advice.freezes else "this annotation holds (tested)"}: "{advice.text}"'
    return replace(finding, help=f"{whole}\n{advice.sentence}")
