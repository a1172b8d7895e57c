"""Infer the widest annotation of a function without one, from a sample call.

Groups of sizes that change together are found first, then what splits of them do to the outputs, on sizes of our own
choice; the annotation that says so is tested by the ordinary oracle before anybody sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from nnscaler.ir.layout import Sharded
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.inputs.draw_calls import sample_calls
from verify.evidence.options import OpOptions
from verify.evidence.oracle.kernels import checked_kernels
from verify.operators.suggest.annotation_synthesis import Evidence, compose, consistent
from verify.operators.suggest.leading_dims import with_star
from verify.operators.suggest.probe_call import Question, make_question
from verify.operators.suggest.size_groups import find_groups, growth
from verify.operators.suggest.sizes import resize
from verify.operators.suggest.tested import report_on, with_annotation
from verify.operators.suggest.truth_table import Fact, truth_table
from verify.results.report import Report

ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Suggestion:
    """An annotation, and the report of the test that it passed."""

    text: str
    report: Report


def suggest_annotation(spec: OperatorSpec, options: OpOptions | None = None) -> list[Suggestion]:
    """Return annotations for an operator that has sample inputs, the widest first; none where nothing could be split.

    Raises NnscalerError `sample_inputs_needed` where nothing says what to call it with.
    """
    if spec.sample_inputs is None:
        raise NnscalerError(
            "sample_inputs_needed",
            f"without an annotation, nothing says what to call `{spec.name}` with",
            spec.where,
            help="register_op(..., sample_inputs=lambda: dict(...)) gives arguments to call it with",
        )
    calls = sample_calls(spec)
    return infer_annotation(spec, calls[0], calls[1:], options)


def infer_annotation(
    spec: OperatorSpec, concrete: ConcreteCall, others: Sequence[ConcreteCall] = (), options: OpOptions | None = None
) -> list[Suggestion]:
    """Infer annotations from one call; `others` are calls that the annotation must fit and hold on too.

    Of `spec`, annotation and sample inputs are not read.
    """
    function = function_of(concrete.call.operator, spec)
    with checked_kernels():
        question = make_question(spec, function, concrete)
        evidence = gather(question)
    samples = [evidence.question, question, *(make_question(spec, function, c) for c in others)]
    facts = consistent(evidence.facts)
    for _ in range(ATTEMPTS):
        if not facts:
            break
        try:
            known = with_annotation(spec, compose(replace(evidence, facts=facts), spec)[0])  # with its parameters
            text, by_name = compose(replace(evidence, facts=facts), known)
            candidate = with_annotation(spec, text, samples)
        except AnnotationError:
            break
        report = report_on(candidate, options)
        if report.verdict.passes:
            return [*_starred(spec, text, samples, options), Suggestion(text, report)]
        wrong = _refuted(report, by_name) or [f for f in facts if _leans_on_sizes(f)]
        if not wrong:
            break
        facts = tuple(f for f in facts if f not in wrong)
    return []


def _starred(spec: OperatorSpec, text: str, samples: Sequence[Question], options: OpOptions | None) -> list[Suggestion]:
    """Return the same annotation for any number of leading dims, if it holds."""
    with checked_kernels():
        found = with_star(text, samples[0])
    if found is None:
        return []
    starred, other = found
    report = report_on(with_annotation(spec, starred, [other, *samples]), options)
    return [Suggestion(starred, report)] if report.verdict.passes else []


def gather(question: Question) -> Evidence:
    """Run the function on sizes of our own choice and collect the facts about its splits."""
    groups = find_groups(question)
    resized = resize(question, groups)
    facts = truth_table(resized, groups)
    outputs = resized.run(resized.tensors, {})
    return Evidence(resized, outputs, facts, {group: growth(resized, group) for group in groups})


def _leans_on_sizes(fact: Fact) -> bool:
    """Return whether the fact's text contains a number that may be specific to the sizes on which it was found."""
    outers = [s.outer for s in (*fact.inputs, *fact.outputs) if isinstance(s, Sharded)]
    return not fact.integers and (fact.tail > 1 or any(outer > 1 for outer in outers))


def _refuted(report: Report, by_name: Mapping[str, Fact]) -> list[Fact]:
    """Return the facts of the identifiers that did not pass."""
    failed = [c.name for c in report.checks if not c.verdict.passes]
    return [fact for name, fact in by_name.items() if any(f"split `{name}` " in check for check in failed)]
