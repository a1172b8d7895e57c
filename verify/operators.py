"""`verify_op`: is an operator's annotation true?

Every identifier is split in 2 and 3 parts, every shard runs as the compiler would run it, and outputs and input
gradients (under random cotangents) are compared with the whole operator's, in float64. The whole and its shards run
the same backward: that a gradient is the derivative is not what this checks.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from nnscaler.ir.placement import RunPartial, Split
from nnscaler.transform.signature import Signature
from verify.environment import environment
from verify.finding import Finding
from verify.op_checks.contradiction import contradiction
from verify.op_checks.identifier import (
    Failure,
    Outcome,
    Source,
    Unusable,
    linear_choices,
    make_source,
    run_choices,
    splits_of,
)
from verify.op_checks.suggest import frozen, suggest
from verify.op_checks.target import find_operator, registered_in
from verify.report import Check, Report
from verify.verdict import Verdict


def verify_op(operator: Any, *, annotation: str | Callable[..., Any] | None = None, seed: int = 0) -> Report:
    """Compares the shards of `operator` with the whole.

    `operator`: a registered operator, its name, `file.py::function`, `package.module:function`, or any callable with
    `annotation`. Raises NnscalerError for what cannot be run at all: an unknown name, no annotation, an annotation
    that is not in the language, a call that needs sample inputs.
    """
    started = time.perf_counter()
    try:
        spec = find_operator(operator, annotation)
    except AnnotationError as error:
        report = contradiction(operator, annotation, error, seed)
        if report is None:
            raise
        return replace(report, seconds=time.perf_counter() - started)
    return verify_spec(spec, seed, reproduce_line(spec, annotation, seed))


def verify_spec(spec: OperatorSpec, seed: int, reproduce: str | None) -> Report:
    """As `verify_op`, for an operator's record; `reproduce` is the line that findings give."""
    started = time.perf_counter()
    checks: list[Check] = []
    findings: list[Finding] = []
    text = ""
    notes: dict[str, None] = {}
    try:
        if spec.random:
            raise Unusable("random_operator", f"`{spec.name}` draws random numbers")
        source = make_source(spec, seed)
        signatures = _signatures(source)
        text = signatures[0].bound.text if signatures[0].bound is not None else ""
        for identifier, signature in _identifiers(source, signatures).items():
            check, found = _check_identifier(source, identifier, signature, notes)
            checks.append(check)
            findings += found
        linear = _check_linear(source, signatures)
        if linear is not None:
            checks.append(linear[0])
            findings += linear[1]
    except Unusable as unusable:
        refuted = int(unusable.refuted)
        checks.append(Check("whole operator", (Verdict.INCONCLUSIVE, Verdict.REFUTED)[refuted], refuted, refuted))
        findings.append(_unusable(spec, unusable))
    except AnnotationError as error:
        checks.append(Check("whole operator", Verdict.REFUTED, 1, 1))
        findings.append(_does_not_fit(spec, error))
    if not findings and not any(check.count for check in checks):
        findings.append(_nothing(spec, text))
    setting = f"`{text}`" if text else ""
    return Report(
        "verify-op",
        spec.name,
        setting,
        seed,
        tuple(checks),
        tuple(f.with_reproduce(reproduce) for f in findings),
        tuple(notes),
        {**environment(), "dtype": "float64"},
        time.perf_counter() - started,
    )


def verify_file(file: str, seed: int) -> Report:
    """Imports a file and verifies every operator that it registers, as one report."""
    started = time.perf_counter()
    reports = [(spec.name, verify_spec(spec, seed, reproduce_line(spec, None, seed))) for spec in registered_in(file)]
    checks = [replace(check, name=f"{name}: {check.name}") for name, report in reports for check in report.checks]
    for name, report in reports:
        if not report.checks:  # nothing to split: one open check keeps the file from passing on the others' strength
            checks.append(Check(f"{name}: nothing to split", Verdict.INCONCLUSIVE, 0))
    findings = [finding for _, report in reports for finding in report.findings]
    notes = dict.fromkeys(note for _, report in reports for note in report.notes)
    setting = f"({len(reports)} operator{'s' * (len(reports) != 1)})"
    seconds = time.perf_counter() - started
    found = {**environment(), "dtype": "float64"}
    return Report(
        "verify-op", os.path.basename(file), setting, seed, tuple(checks), tuple(findings), tuple(notes), found, seconds
    )


def _signatures(source: Source) -> list[Signature]:
    """The annotation bound to every call that is tested: calls of one operator may differ in their identifiers."""
    found = [signature for _, signature in source.wholes(None)]
    if not found:
        raise Unusable("uninformative", f"`{source.spec.name}` shows nothing on its sample inputs")
    return found


def _identifiers(source: Source, signatures: list[Signature]) -> dict[str, Signature]:
    """Identifiers that may be split, each group that is split together once, with a call that has them."""
    found: dict[str, Signature] = {}
    for signature in signatures:
        bound = signature.bound
        assert bound is not None
        for name in bound.sizes:
            first = bound.tied.get(name, (name,))[0]
            if bound.marks.get(name) != "^" and (bound.sizes[name] > 1 or not source.samples):
                found.setdefault(first, signature)
    return found


def _check_identifier(
    source: Source, identifier: str, signature: Signature, notes: dict[str, None]
) -> tuple[Check, list[Finding]]:
    started = time.perf_counter()
    assert signature.bound is not None
    mark = signature.bound.marks.get(identifier, "")
    reduction = signature.bound.reductions.get(identifier, "sum")
    kind = "spatial" if not mark else "reduction" if reduction == "sum" else f"reduction ({reduction})"
    outcome = run_choices(source, identifier, splits_of(identifier))
    findings = [_wrong_split(source, identifier, failure) for failure in outcome.failures[:1]]
    if "positive" in outcome.kinds:
        notes[f"`{source.spec.name}` gives NaN or infinity on some inputs: what passed holds on positive inputs"] = None
    if not outcome.count:
        notes.update(dict.fromkeys(f"`{identifier}` was not tested: {reason}" for reason in outcome.skipped))
    seconds = time.perf_counter() - started
    return _as_check(f"split `{identifier}` ({kind})", outcome, seconds), findings


def _check_linear(source: Source, signatures: list[Signature]) -> tuple[Check, list[Finding]] | None:
    sets = list(dict.fromkeys(found for signature in signatures for found in signature.linear))
    if not sets:
        return None
    started = time.perf_counter()
    outcome = run_choices(source, None, linear_choices(sets))
    findings = [_wrong_linear(source, failure) for failure in outcome.failures[:1]]
    return _as_check("partial sums pass through", outcome, time.perf_counter() - started), findings


def _as_check(name: str, outcome: Outcome, seconds: float) -> Check:
    refuted = len(outcome.failures)
    verdict = Verdict.REFUTED if refuted else Verdict.TESTED_EXACT if outcome.count else Verdict.INCONCLUSIVE
    detail = "" if outcome.count else "; ".join(outcome.skipped)
    return Check(name, verdict, outcome.count, refuted, seconds, detail)


def _wrong_split(source: Source, identifier: str, failure: Failure) -> Finding:
    spec = source.spec
    assert isinstance(failure.choice, Split) and failure.signature.bound is not None
    text = failure.signature.bound.text
    suggested = suggest(source, identifier)
    name = "*" if identifier.startswith("*") else identifier
    help = None
    if suggested is not None and suggested == frozen(text, name):
        help = f'`{identifier}` cannot be split: freeze it with "{suggested}"'
    elif suggested is not None:
        help = f'this annotation holds (tested): "{suggested}"'
    facts = counter_example(failure, identifier)
    if failure.raised is not None:
        message = f"`{spec.name}` raises on a shard of `{identifier}`, which `{text}` says may be split"
        facts["error"] = str(failure.raised).splitlines()[0][:200]
        return Finding("shard_raises", message, spec.where, facts, help=help)
    assert failure.mismatch is not None
    message = f"{failure.mismatch.what} of `{spec.name}` is wrong when `{identifier}` is split, as `{text}` allows"
    return Finding("annotation_wrong", message, spec.where, facts, _cause(failure, identifier), help)


def counter_example(failure: Failure, identifier: str) -> dict[str, str]:
    """The facts of a failure, in the order in which they are shown."""
    call = failure.signature.call
    facts = {"identifier": identifier, "parts": str(failure.parts)}
    if isinstance(failure.choice, Split) and failure.choice.outer > 1:
        facts["outer"] = str(failure.choice.outer)
    facts["shapes"] = ", ".join(str(t.shape) for t in call.tensors())
    facts["dtype"] = "float64"
    if failure.raised is not None:
        facts["shard"] = f"{failure.raised.rank} with shapes {', '.join(map(str, failure.raised.shapes))}"
    elif failure.mismatch is not None:
        difference = failure.mismatch.difference
        facts["tensor"] = failure.mismatch.what
        if difference.problem:
            facts["difference"] = difference.problem
        else:
            facts["mismatched"] = f"{difference.mismatched} of {difference.elements}"
            facts["greatest difference"] = f"{difference.absolute:.6g} ({difference})"
    return facts


def _cause(failure: Failure, identifier: str) -> str | None:
    bound = failure.signature.bound
    assert bound is not None and failure.mismatch is not None
    if bound.marks.get(identifier) == "+":
        return f"`{identifier}` is marked as a reduction, but shards of it do not add up to the whole"
    return f"`{identifier}` has no mark, but what a shard computes depends on the other shards"


def _wrong_linear(source: Source, failure: Failure) -> Finding:
    assert isinstance(failure.choice, RunPartial)
    slots = sorted(failure.choice.slots)
    message = f"`{source.spec.name}` is declared linear in inputs {slots}, and is not"
    facts = counter_example(failure, f"partial sums in inputs {slots}")
    return Finding("linear_set_wrong", message, source.spec.where, facts, help="remove the set from `linear`")


def _unusable(spec: OperatorSpec, unusable: Unusable) -> Finding:
    help = None
    if unusable.refuted:
        help = "the operator runs when all sizes are equal: two identifiers of the annotation should be one"
    elif unusable.code in ("annotation_does_not_fit", "uninformative"):
        help = "register_op(..., sample_inputs=lambda: dict(...)) gives inputs on which the operator runs"
    return Finding(unusable.code, str(unusable), spec.where, help=help)


def _does_not_fit(spec: OperatorSpec, error: AnnotationError) -> Finding:
    first, _, rest = error.message.partition("\n")
    return Finding("annotation_does_not_fit", first, spec.where, cause=rest.strip() or None, help=error.help)


def _nothing(spec: OperatorSpec, text: str) -> Finding:
    message = f"`{spec.name}` has nothing to split" + (f" in `{text}`" if text else "")
    return Finding("nothing_to_split", message, spec.where)


def reproduce_line(spec: OperatorSpec, annotation: str | Callable[..., Any] | None, seed: int) -> str | None:
    """The command line that verifies this operator again; None where no text names it."""
    target = spec.name if spec.target is None else None
    if spec.where is not None and spec.qualname and "<" not in spec.qualname:
        target = f"{spec.where.file}::{spec.qualname}"
    if target is None or (annotation is not None and not isinstance(annotation, str)):
        return None
    given = "" if annotation is None else f" --annotation {shlex.quote(annotation)}"
    return f"nnscaler verify-op {target}{given} --seed {seed}"
