"""Infer the widest annotation of a function without one, from a sample call.

Groups of sizes that change together are found first, then what splits of them do to the outputs, on sizes of our own
choice; the annotation that says so is tested by the ordinary oracle before anybody sees it.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import torch
from torch import Tensor

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import Annotation, Identifier, Opaque, Operand, print_annotation
from op_registry.annotation.well_formed import map_identifiers
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError, NnscalerError
from nnscaler.layout import Sharded
from nnscaler.runtime.tensor_bits_and_differences import is_finite
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.inputs.draw_calls import sample_calls
from verify.evidence.oracle.size_checked_kernels import checked_kernels
from verify.evidence.verify_op_options import OpOptions
from verify.operators.suggest.ask_oracle import report_on, with_annotation
from verify.operators.suggest.call_with_other_tensors_and_integers import Number, Question, make_question
from verify.operators.suggest.compose_annotation_from_facts import Evidence, compose, consistent
from verify.operators.suggest.coupled_sizes import Element, Group, find_groups, growth, size_of
from verify.operators.suggest.layout_truth_table import Fact, truth_table
from verify.results.report import Report

# Sizes to ask a question on: small, different from each other, and divisible by 2 and 3 with more than one element
# left in each shard.

PLAIN = (6, 24, 12, 36, 48, 60)  # where no integer divides a size
FACTORED = (12, 24, 36, 48, 60)  # where one may
INTEGER = 6
LONGEST = 1 << 15  # elements of one tensor


def resize(question: Question, groups: Sequence[Group]) -> Question:
    """Return the question on sizes of our own choice, as far as the function takes them; else on its own."""
    free: set[Element] = {
        e for group in groups if len(group) == 1 for e in group if isinstance(e, str) and e in question.integers
    }
    taken: set[int] = set()
    outermost = [g for g in groups if not g <= free and not any(g < other for other in groups)]
    for group in outermost:  # what may be larger than another stays in the sample's proportion to it
        for target in _targets(question, group, free, taken):
            other = _scaled(question, group, target)
            if other is not None:
                taken.add(target)
                question = other
                break
    for name in sorted(map(str, free)):
        if question.integers[name] % INTEGER:
            question = _scaled(question, frozenset((name,)), INTEGER) or question
    return question


def _targets(question: Question, group: Group, free: set[Element], taken: set[int]) -> Iterator[int]:
    """Yield sizes for the smallest of the group to try, the best first."""
    smallest = _common(question, group)
    factored = any(size_of(question, e) % question.integers[str(i)] == 0 for i in free for e in group)
    if any(isinstance(e, str) for e in group):
        yield INTEGER
    wanted = (*FACTORED, *PLAIN) if factored else PLAIN
    yield from (target for target in wanted if target not in taken)
    yield from (target for target in (12, 24, 6) if target in taken)  # better equal sizes than too large ones
    if smallest % INTEGER:
        yield smallest * INTEGER


def _common(question: Question, group: Group) -> int:
    return gcd(*(size_of(question, e) for e in group))


def _scaled(question: Question, group: Group, target: int) -> Question | None:
    """Return with the group's sizes in proportion, so that their common divisor is `target`; None where that does not
    run."""
    common = _common(question, group)
    tensors = list(question.tensors)
    integers: dict[str, Number] = {}
    for element in group:
        if isinstance(element, str):
            integers[element] = question.scaled(element, target, common)
        else:
            index, dim = element
            tensors[index] = _with_size(tensors[index], dim, size_of(question, element) // common * target)
    if any(t.numel() > LONGEST for t in tensors):
        return None
    other = question.changed(tensors, integers)
    try:
        outputs = other.run(other.tensors, {})
    except Exception:  # noqa: BLE001 - the size was our choice
        return None
    return other if all(o is None or is_finite(o) for o in outputs) else None


def _with_size(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return elements repeated or left out along one dim."""
    return tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])


# `*` for leading dims: an annotation of one call's number of dims, said for any number of them.


def with_star(text: str, question: Question) -> tuple[str, Question] | None:
    """Return the text with `*` for the dims with which the first operand and every output begin, and a call with
    another number of them, on which the function runs; None where there is no such thing."""
    annotation = parse(text)
    length = _leading(annotation)
    inputs = [o for o in annotation.inputs if isinstance(o, Operand)]
    if not length or len(inputs) != len(question.tensors):
        return None
    names = _names(inputs[0])[:length]
    tensors = [
        _regrouped(t, length) if _names(o)[:length] == names else t
        for t, o in zip(question.tensors, inputs, strict=True)
    ]
    other = question.changed(tensors, {})
    try:
        outputs = other.run(other.tensors, {})
    except Exception:  # noqa: BLE001 - the number of dims was our choice
        return None
    if any(o is not None and not is_finite(o) for o in outputs):
        return None
    star = Identifier("*")

    def on_operand(operand: Operand | Opaque) -> Operand | Opaque:
        if isinstance(operand, Opaque) or _names(operand)[:length] != names:
            return operand
        return replace(operand, dims=(star, *operand.dims[length:]))

    starred = Annotation(tuple(map(on_operand, annotation.inputs)), tuple(map(on_operand, annotation.outputs)))
    return print_annotation(_renamed(starred, question)), other


def _renamed(annotation: Annotation, question: Question) -> Annotation:
    """Rename the identifiers to letters from the start of the alphabet."""
    letters = (c for c in string.ascii_lowercase if c not in question.integers)
    names: dict[str, str] = {}
    for identifier in annotation.identifiers():
        if len(identifier.name) == 1 and not identifier.is_wildcard and identifier.name not in question.integers:
            names.setdefault(identifier.name, "")
    for name in names:
        names[name] = next(letters)
    return map_identifiers(annotation, lambda i: replace(i, name=names.get(i.name, i.name)))


def _leading(annotation: Annotation) -> int:
    """Count the leading dims that may become `*`: one identifier each, without mark, in the same places everywhere."""
    operands = list(annotation.operands())
    first = next((o for o in annotation.inputs if isinstance(o, Operand)), None)
    outputs = [o for o in annotation.outputs if isinstance(o, Operand)]
    if first is None or not outputs:
        return 0
    length = 0
    for dim in first.dims:
        if not isinstance(dim, Identifier) or dim.mark:
            break
        length += 1
    while length:
        names = _names(first)[:length]
        with_them = [o for o in operands if _names(o)[:length] == names]
        without = [o for o in operands if not any(i.name in names for i in o.identifiers())]
        if all(o in with_them for o in outputs) and len(with_them) + len(without) == len(operands):
            return length
        length -= 1
    return 0


def _names(operand: Operand) -> list[str]:
    """Return the name of every dim that is one identifier, "" for the others."""
    return [d.name if isinstance(d, Identifier) and not d.mark else "" for d in operand.dims]


def _regrouped(tensor: Tensor, length: int) -> Tensor:
    """Return the leading dims as one, or one of them as two."""
    shape = tuple(tensor.shape)
    leading: Sequence[int] = (prod(shape[:length]),) if length > 1 else (2, shape[0] // 2)
    return tensor.reshape(*leading, *shape[length:])


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
            help="`--sample-inputs NAME` names a function of its file that gives arguments for a call, and so does "
            "register_op(..., sample_inputs=lambda: dict(...))",
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
