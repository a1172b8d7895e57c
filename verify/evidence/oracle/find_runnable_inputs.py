"""The first inputs, drawn from the annotation, on which an operator runs.

Sizes of a kind that it accepts; and, where floating numbers do not do, integers below the size of one of the other
operands' identifiers (ids of a table's rows), below a few, or booleans in place of one operand or two. Whole numbers
have no gradient: they never take the place of floating ones through which one flows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, islice, product, takewhile

import torch

from op_registry.annotation.syntax_tree import Annotation, Operand
from op_registry.annotation.well_formed import parse_checked

from nnscaler.errors import AnnotationError
from nnscaler.exception_in_one_line import in_one_line
from verify.evidence.inputs.draw_calls import SPLIT_SIZE, Style, choose_sizes, identifiers_of
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.run_whole_operator import WholeRun, run_whole
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import Kind

TRIES = 200
FEW = ("8", "4", "2")  # ids below a number of the operator's own: of experts, of segments
Ranges = tuple[tuple[int, str], ...]  # operands, by position, and what their whole numbers are below
DOMAINS: tuple[Kind, ...] = ("integers", "positive", "definite")  # of values, the widest first


class Unusable(Exception):
    """The whole operator cannot be tested on these inputs; `code` is a finding code of the catalogue.

    `refuted`: it runs on other shapes, so that what it raises on the annotation's shapes is a counter-example.
    """

    def __init__(self, code: str, message: str, refuted: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.refuted = refuted


def first_inputs(runner: OperatorRunner) -> tuple[Style, tuple[Inputs, ...]]:
    """Return the style of sizes and the inputs: floating ones where the operator runs on any, then ids that may not be
    negative. Raises Unusable where the operator runs on none, and AnnotationError where it runs, and its annotation
    fits no sizes: what halves a size may fit it where all are even."""
    annotation = parse_checked(str(runner.spec.annotation))
    wanted: tuple[Style, ...] = ("distinct", "smooth") if runner.options.safeguards.distinct_sizes else ("equal",)
    message = ""
    misfit: AnnotationError | None = None
    for style in wanted:
        inputs = _inputs(runner, annotation, style)
        try:
            found = in_domain(runner, inputs)
        except AnnotationError as error:
            misfit = misfit or error
            continue
        except WholeRaised as raised:
            message = message or _told(runner, raised)
            continue
        if _runs(runner, inputs):
            return style, (inputs,)
        return style, (found, *_with_ids(runner, annotation, found))
    if misfit is not None:
        raise misfit
    for style in wanted:
        inputs = without_derivatives(runner, _inputs(runner, annotation, style))
        if inputs.without_gradient:
            return style, (inputs,)
        integral = _with_whole_numbers(runner, annotation, inputs)
        if integral is not None:
            return style, (integral,)
    try:
        in_domain(runner, _inputs(runner, annotation, "equal"))
    except WholeRaised:
        raise Unusable("annotation_does_not_fit", message) from None
    raise Unusable("annotation_does_not_fit", message, refuted=True)


def _inputs(runner: OperatorRunner, annotation: Annotation, style: Style) -> Inputs:
    sizes = tuple(choose_sizes(annotation, (), style).items())
    return Inputs(None, sizes, "integers", runner.options.seed)


def _told(runner: OperatorRunner, raised: WholeRaised) -> str:
    shapes = ", ".join(map(str, raised.shapes))
    return f"on inputs of shapes {shapes} `{runner.spec.name}` raises {in_one_line(raised.error, 200)}"


def in_domain(runner: OperatorRunner, inputs: Inputs) -> Inputs:
    """Return the inputs with values on which the operator is finite, else on which it runs. Raises WholeRaised, as it
    does on the first ones, where there are none."""
    raised: WholeRaised | None = None
    runs: Inputs | None = None
    for kind in DOMAINS:
        candidate = replace(inputs, kind=kind)
        try:
            whole = runner.prepare(candidate).whole
        except WholeRaised as error:
            raised = raised or error
            continue
        if whole.finite:
            return candidate
        runs = runs or candidate
    if runs is None:
        assert raised is not None
        raise raised
    return runs


def without_derivatives(runner: OperatorRunner, inputs: Inputs) -> Inputs:
    """Return the inputs with the tensors as constants for which torch has no derivative: no program asks for theirs."""
    try:
        runner.prepare(inputs)
    except WholeRaised as raised:
        if _NO_DERIVATIVE.search(str(raised.error)):
            indices = range(len(raised.shapes))
            for constant in chain.from_iterable(combinations(indices, count) for count in (1, 2)):
                candidate = replace(inputs, without_gradient=constant)
                if _runs(runner, candidate):
                    return candidate
    return inputs


# What torch's kernels say of one argument in a forward pass.
_NO_DERIVATIVE = re.compile(
    r"not differentiable with respect to argument '\w+'|derivative for '\w+' is not implemented"
)


def _with_ids(runner: OperatorRunner, annotation: Annotation, found: Inputs) -> tuple[Inputs, ...]:
    """Return the inputs with integers or booleans in operands through which no gradient flows: none or one. These stand
    beside what was found, which shows the gradients of all that takes floating numbers."""
    gradients = runner.prepare(found).whole.gradients
    choices = (
        choice
        for choice in _choices(annotation, dict(found.sizes))
        if all(gradients[_tensor_of(annotation, position)] is None for position, _ in choice)
    )
    chosen = _at_split_sizes(runner, annotation, (c for _, c in _running(runner, found, choices)))
    return () if chosen is None else (in_domain(runner, chosen),)


def _with_whole_numbers(runner: OperatorRunner, annotation: Annotation, inputs: Inputs) -> Inputs | None:
    """Return the inputs with integers or booleans in some operand. None where the operator does not run on any, or
    takes floating numbers there that ask for no gradient: then what it raises is about its backward. Raises Unusable
    where it takes the same numbers as floating ones: nothing drawn shows their gradient."""
    choices = _choices(annotation, dict(inputs.sizes))
    running = takewhile(
        lambda found: not _only_backward_raises(runner, annotation, *found), _running(runner, inputs, choices)
    )
    chosen = _at_split_sizes(runner, annotation, (candidate for _, candidate in running))
    if chosen is None:
        return None
    for position, _ in chosen.whole_numbers:
        index = _tensor_of(annotation, position)
        if _has_gradient_as_floating(runner, chosen, index):
            told = f"`{runner.spec.name}` takes floating numbers as input {position}, and raises on all that are drawn"
            raise Unusable("claim_not_tested", f"{told}: its gradient is not tested")
    return chosen


def _running(runner: OperatorRunner, inputs: Inputs, choices: Iterator[Ranges]) -> Iterator[tuple[Ranges, Inputs]]:
    """Yield the choices on which the operator runs, with the inputs that they make of these."""
    for choice in islice(choices, TRIES):
        candidate = without_derivatives(runner, replace(inputs, whole_numbers=choice))
        if _runs(runner, candidate):
            yield choice, candidate


def _only_backward_raises(runner: OperatorRunner, annotation: Annotation, choice: Ranges, candidate: Inputs) -> bool:
    """Return whether the operator takes floating numbers of some domain in place of an operand's whole ones, if these
    ask for no gradient."""
    for operand in choice:
        others = tuple(other for other in choice if other != operand)
        without = (*candidate.without_gradient, _tensor_of(annotation, operand[0]))
        floating = replace(candidate, whole_numbers=others, without_gradient=without)
        if any(_runs(runner, replace(floating, kind=kind)) for kind in DOMAINS):
            return True
    return False


def _has_gradient_as_floating(runner: OperatorRunner, inputs: Inputs, index: int) -> bool:
    """Return whether a tensor of whole numbers may be of floating ones, the same, and a gradient then flows through it,
    or raises on its way."""
    call = runner.concrete(inputs)
    tensors = tuple(t.double() if i == index else t for i, t in enumerate(call.tensors))
    floating = replace(call, tensors=tensors)

    def run(constants: frozenset[int]) -> WholeRun | None:
        try:
            return run_whole(
                runner.function(call), floating, torch.Generator(), torch.float64, call.constants | constants
            )
        except Exception:  # noqa: BLE001 - an index must be an integer
            return None

    if run(frozenset((index,))) is None:
        return False
    whole = run(frozenset())
    return whole is None or whole.gradients[index] is not None


def _at_split_sizes(runner: OperatorRunner, annotation: Annotation, candidates: Iterator[Inputs]) -> Inputs | None:
    """Return the first inputs with which the operator runs also where an identifier has the size that it is split at,
    which ids of five kinds need not follow; else the first of all."""
    first: Inputs | None = None
    for candidate in candidates:
        first = first or candidate
        if all(_runs(runner, other) for other in _split_sizes(annotation, candidate)):
            return candidate
    return first


def _tensor_of(annotation: Annotation, position: int) -> int:
    """Return which tensor of a drawn call an operand is."""
    return sum(isinstance(operand, Operand) for operand in annotation.inputs[:position])


def _split_sizes(annotation: Annotation, inputs: Inputs) -> Iterator[Inputs]:
    """Yield the inputs with each identifier that may be split at the size that it is split at."""
    sizes = dict(inputs.sizes)
    for name in dict.fromkeys(i.name for i in annotation.identifiers() if not i.is_frozen and i.name in sizes):
        yield replace(inputs, sizes=tuple({**sizes, name: SPLIT_SIZE}.items()))


def _runs(runner: OperatorRunner, inputs: Inputs) -> bool:
    try:
        runner.prepare(inputs)
    except WholeRaised:
        return False
    return True


def _choices(annotation: Annotation, sizes: dict[str, int]) -> Iterator[Ranges]:
    """Yield ranges to try, larger ones first: the first that does not reach beyond a table is the table's own size."""
    operands = [(i, o) for i, o in enumerate(annotation.inputs) if isinstance(o, Operand)]
    names = [n for n in identifiers_of(annotation) if n in sizes]
    ranges = [*sorted(names, key=lambda n: -sizes[n]), *FEW, ""]
    for count in (1, 2):
        for chosen in combinations(operands, count):
            for below in product(ranges, repeat=count):
                yield tuple((position, name) for (position, _), name in zip(chosen, below, strict=True))
