"""One small call that stands for all calls of its form, whatever their sizes.

Sizes of a real model (16384 wide, a vocabulary of 128256) are never allocated: identifiers get small sizes, each its
own, and the arguments that the operator's record declares as sizes follow. Everything else of the call stays, for an
argument that is not a size is part of the form. Where that is no call of the operator (a number that the record does
not declare is a size after all), numbers that are sizes are taken for them; a call of which `small` is an instance of
the same form with other sizes is what has been looked at, and the form is what the lemma names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.annotation.syntax_tree import UNSPLIT
from op_registry.call import Call
from op_registry.errors import AnnotationError
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec, Refusal

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.operation_annotations import Signature
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import resized
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.inputs.draw_calls import builtin_call, sample_calls
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.find_runnable_inputs import in_domain
from verify.evidence.smt.smaller_calls import same_kind, variants
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import OpOptions
from verify.programs.lemmas.stand_in_calls_and_tensors import (
    Unrepresented,
    only_whole,
    plain,
    with_finite_numbers,
    with_tensors_for,
    without_derivative,
)

FREE = (12, 6, 18, 24)  # splits in 2 and 3, under an outer of 2 as well
MANY = (6, 4, 12, 8, 10, 2, 3)  # where there are more identifiers than that
REST = (2, 3, 5, 7, 4)  # beside those that a case splits
FROZEN = (5, 7, 3, 9, 4)
LARGEST_KERNEL = 11  # a larger frozen size is one of the positions that a kernel moves over
TRIED = (12, 13, 14, 11, 15, 10, 16, 6, 7, 8, 24, 23, 25, 22, 26, 27, 28, 29, 30, 35, 40, 45, 65)  # of those
LARGEST = 1 << 18  # elements of one tensor
SEEDS = 5  # draws of whole numbers that are tried for a result that shows something


@dataclass(frozen=True)
class Representative:
    """
    runner         runs cases on the small call, which is its only sample; `inputs` name it
    follows        an argument that no record declares as a size was taken for one
    samples        it is one of the operator's sample calls
    other_numbers  arguments that are not sizes are others than the program's
    """

    runner: OperatorRunner
    inputs: Inputs
    signature: Signature
    follows: bool = False
    samples: bool = False
    other_numbers: bool = False

    @property
    def form(self) -> str:
        """The call, and how it was made of the program's: one small call may stand for two calls, exactly for one and
        with other numbers for the other, and then less is known of the second."""
        return repr((self.signature.call, self.follows, self.samples, self.other_numbers))


def represent(signature: Signature, seed: int, large: Sequence[str] = ()) -> Representative:
    """Return a small call that runs and that the annotation fits as it fits the real one.

    `large`: identifiers that are to be split (none: all of them). Whole numbers are drawn again where the result is not
    finite, or only zeros, in the end without 0 and 1: a count of labels that happens to be 0 shows nothing. Raises
    Unrepresented.
    """
    first: Representative | None = None
    constant: Representative | None = None
    for number in range(SEEDS + 1):
        if number == SEEDS and constant is not None:
            break
        found = _represent(signature, seed + number, large, counts=number == SEEDS)
        first = first or found
        if not _shows_something(found):
            continue
        if _varies(found):
            return found
        constant = constant or found
    finite = with_finite_numbers(signature)
    if constant is None and finite is not signature and _shows_something(found := _represent(finite, seed, large)):
        return replace(found, other_numbers=True)
    assert first is not None
    return _larger(signature, seed, large) or constant or _sampled(signature, seed) or first


def _sampled(signature: Signature, seed: int) -> Representative | None:
    """Return a sample that shows something: its tensors fit each other (lengths of sequences, and of their targets)."""
    spec, bound = signature.spec, signature.bound
    found = None if spec is None or bound is None else _of_samples(_Attempt(spec, bound, seed), signature)
    return found if found is not None and _shows_something(found) else None


def call_of_sizes(signature: Signature, sizes: Mapping[str, int], seed: int) -> Representative:
    """Return the program's call at these sizes. Raises Unrepresented where tensors are too large, or it does not
    run."""
    spec, bound = signature.spec, signature.bound
    if spec is None or bound is None:
        raise Unrepresented("it has no annotation")
    call = signature.call if sizes == bound.sizes else resized(signature, bound, sizes)
    if any(prod(t.shape) > LARGEST for t in call.tensors()):
        raise Unrepresented("its tensors are too large to run it")
    attempt = _Attempt(spec, bound, seed)
    for concrete in with_tensors_for(call, seed):
        found = attempt.on(concrete, wanted=sizes)
        if found is not None:
            return found
    raise Unrepresented(attempt.reason or "it does not run on other numbers")


def _larger(signature: Signature, seed: int, large: Sequence[str]) -> Representative | None:
    """Return a call with dims of other sizes than 1, which tells more: an index into 1 entry is always 0."""
    bound = signature.bound
    if bound is None or 1 not in bound.sizes.values():
        return None
    larger = replace(signature, bound=replace(bound, sizes={n: max(s, 2) for n, s in bound.sizes.items()}))
    try:
        found = _represent(larger, seed, large)
    except Unrepresented:
        return None
    return replace(found, other_numbers=True) if _shows_something(found) and _varies(found) else None


def _varies(small: Representative) -> bool:
    """Return whether the entries of a result differ: in a constant, a cut at the wrong place does not show."""
    outputs = small.runner.prepare(small.inputs).whole.outputs
    return any(bool((o != o.flatten()[0]).any()) for o in outputs if o is not None and o.numel())


def _shows_something(small: Representative) -> bool:
    try:
        whole = small.runner.prepare(small.inputs).whole
    except WholeRaised:
        return False
    return whole.finite and whole.shows_something


def _represent(signature: Signature, seed: int, large: Sequence[str], counts: bool = False) -> Representative:
    """Return the first small call of one seed. `counts`: see `with_tensors_for`."""
    spec, bound = signature.spec, signature.bound
    if spec is None or bound is None:
        spec, bound = only_whole(signature)
        signature = replace(signature, spec=spec, bound=bound, reason="")
    attempt = _Attempt(spec, bound, seed, counts)
    integers = any(t.dtype.startswith(("int", "uint")) for t in signature.call.tensors())
    if integers:  # of samples, they are in range, in order, whatever the operator asks
        for concrete in _samples(spec, seed):
            same = plain(concrete.call) == plain(signature.call)
            found = attempt.on(concrete, samples=True) if same else None
            if found is not None:
                return found
    attempt.reason = ""
    for call, small in _clipped(spec, signature, bound, large):
        for concrete in with_tensors_for(call, seed, counts):
            found = attempt.on(concrete, wanted=small)
            if found is not None:
                return replace(found, other_numbers=True)
    found = _resized_call(attempt, signature, bound, large)
    if found is not None:
        return found
    found = _of_samples(attempt, signature)
    if found is not None:
        return found
    raise Unrepresented(attempt.reason or "its tensors are too large, and its sizes are not identifiers")


def _of_samples(attempt: _Attempt, signature: Signature) -> Representative | None:
    """Return a sample of the operator with other numbers than the call has."""
    for concrete in _samples(attempt.spec, attempt.seed):
        same = plain(concrete.call, values=False) == plain(signature.call, values=False)
        found = attempt.on(concrete, samples=True, literals=False) if same else None
        if found is not None:
            return replace(found, other_numbers=True)
    return None


@dataclass
class _Attempt:
    """Tries calls; `reason`: why the first of them was no representative."""

    spec: OperatorSpec
    bound: BoundAnnotation
    seed: int
    counts: bool = False
    reason: str = ""

    def on(
        self,
        concrete: ConcreteCall,
        follows: bool = False,
        samples: bool = False,
        literals: bool = True,
        wanted: Mapping[str, int] | None = None,
    ) -> Representative | None:
        """Return the representative, if the call runs and is of the same form.

        `literals`: and has the same fixed sizes; `wanted`: and these sizes.
        """
        try:
            runner, inputs, signature = self.run(concrete)
        except (WholeRaised, AnnotationError, NnscalerError, Refusal) as error:
            self.reason = self.reason or first_line(error)
            return None
        problem = self.other_form(signature, literals)
        assert signature.bound is not None
        if not problem and wanted is not None and dict(signature.bound.sizes) != dict(wanted):
            problem = "its sizes are arguments that its record does not declare"
        if problem:
            self.reason = self.reason or problem
            return None
        return Representative(runner, inputs, signature, follows, samples)

    def run(self, concrete: ConcreteCall) -> tuple[OperatorRunner, Inputs, Signature]:
        """Run the whole operator, with gradients for all tensors but those of which torch says that they have none
        (running statistics). Raises WholeRaised and AnnotationError."""
        try:
            return self.run_with(concrete)
        except WholeRaised as error:
            constants = concrete.constants | without_derivative(concrete.call, str(error))
            if constants == concrete.constants:
                raise
        return self.run(replace(concrete, constants=constants))

    def run_with(self, concrete: ConcreteCall) -> tuple[OperatorRunner, Inputs, Signature]:
        """Run the whole operator, with a gradient for all but its constants. Raises WholeRaised and AnnotationError."""
        runner = OperatorRunner(self.spec, OpOptions(self.seed))
        runner.rows, runner.given = (), (concrete,)
        inputs = in_domain(runner, Inputs(0, (), "integers", self.seed))
        return runner, inputs, runner.prepare(inputs).signature

    def other_form(self, signature: Signature, literals: bool) -> str:
        """Explain why a call is not of the same form; empty if it is."""
        assert signature.bound is not None
        if not same_kind(self.bound, signature.bound):
            return "at small sizes its annotation is another one"
        if literals and _literals(self.bound) != _literals(signature.bound):
            return "at small sizes its annotation has other fixed sizes"
        return "" if _ones(self.bound) == _ones(signature.bound) else "at small sizes other dims have size 1"


def _resized_call(
    attempt: _Attempt, signature: Signature, bound: BoundAnnotation, large: Sequence[str]
) -> Representative | None:
    """Return the first of `_calls` that runs; of a call whose sizes the operator computes, one that
    `_searched` finds."""
    computed = _computed(bound)
    for call, wanted, follows in _calls(attempt.spec, signature, bound, large):
        if wanted is None and computed:
            found = _searched(attempt, signature, bound, large or computed, computed)
            if found is not None:
                return found
            computed = ()
        if any(prod(t.shape) > LARGEST for t in call.tensors()):
            continue
        for concrete in with_tensors_for(call, attempt.seed, attempt.counts):
            found = attempt.on(concrete, follows=follows, wanted=wanted)
            if found is not None:
                return found
    return None


def _samples(spec: OperatorSpec, seed: int) -> Iterator[ConcreteCall]:
    """Yield the operator's own sample calls."""
    if spec.sample_inputs is not None:
        yield from sample_calls(spec)
    elif spec.target is None:
        for row in samples_of(spec.name):
            yield builtin_call(row, "integers", torch.Generator().manual_seed(seed))


def _clipped(
    spec: OperatorSpec, signature: Signature, bound: BoundAnnotation, large: Sequence[str]
) -> Iterator[tuple[Call, Mapping[str, int]]]:
    """Yield small calls in which a number that counts entries of an identifier is the last of its entries.

    This is for numbers (the row of a padding token) that lie beyond all small sizes: left as they are, they would mean
    no entry. Without a hook, a built-in operator makes the same of a number on every shard.
    """
    if spec.localize is None and spec.target is None:
        return
    for sizes in _tables(bound, large):
        call = resized(signature, bound, sizes)
        top = max(sizes.values(), default=0)
        for name, size in bound.sizes.items():
            args = tuple(_inside(a, top, size, sizes[name]) for a in call.args)
            kwargs = {key: _inside(value, top, size, sizes[name]) for key, value in call.kwargs.items()}
            if (args, kwargs) != (call.args, call.kwargs):
                yield Call(call.operator, args, kwargs), sizes


def _inside(value: Any, top: int, size: int, small: int) -> Any:
    counts = isinstance(value, int) and not isinstance(value, bool) and top <= value < size
    return small - 1 if counts else value


def _literals(bound: BoundAnnotation) -> list[int]:
    return [
        f.size
        for operand in (*bound.inputs, *bound.outputs)
        for dim in (operand.dims if operand is not None else ())
        for f in dim.factors
        if f.identifier is None
    ]


def _ones(bound: BoundAnnotation) -> frozenset[str]:
    return frozenset(name for name, size in bound.sizes.items() if size == 1)


def _calls(
    spec: OperatorSpec, signature: Signature, bound: BoundAnnotation, large: Sequence[str]
) -> Iterator[tuple[Call, Mapping[str, int] | None, bool]]:
    """Yield calls to try, those that change least first, with their sizes where these are ours to choose, and whether
    undeclared numbers were taken for sizes."""
    for sizes in _tables(bound, large):
        yield resized(signature, bound, sizes), sizes, False
    split = [n for n in bound.sizes if bound.marks.get(n) not in UNSPLIT and bound.sizes[n] > 1]
    free = [n for n in bound.sizes if n in large or (not large and n in split)]
    for call in variants(spec, signature, dict(zip(free, FREE, strict=False))):
        yield call, None, True
    call = signature.call
    yield Call(call.operator, call.args, call.kwargs), None, False


def _tables(bound: BoundAnnotation, large: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes: frozen ones small, then also equal where they are (square matrices), then as they are. 1 stays."""
    held = {n for n, mark in bound.marks.items() if mark in UNSPLIT and n not in large}  # `t<` is split into slices
    splittable = [n for n in bound.sizes if n not in held and bound.sizes[n] > 1]
    for how in ("small", "equal", "kept"):
        frozen, small = iter(FROZEN * len(bound.sizes)), dict[object, int]()
        wanted = [n for n in splittable if n in large] if large else splittable
        split = iter((FREE if len(wanted) <= len(FREE) else MANY) * len(bound.sizes))
        rest = iter(REST * len(bound.sizes))
        sizes: dict[str, int] = {}
        for name, size in bound.sizes.items():
            if size <= 1:
                sizes[name] = size
            elif name in held:
                sizes[name] = size if how == "kept" else small.setdefault((name, size)[how == "equal"], next(frozen))
            else:
                sizes[name] = next(split if name in wanted else rest)
        sizes.update({name: sizes[along] for name, along in bound.rows.items() if along in sizes})
        yield _tied(bound, sizes)


def _computed(bound: BoundAnnotation) -> tuple[str, ...]:
    """Return the identifiers that outputs have and no input: under overlapping windows, their number is computed."""
    given = {n for operand in bound.inputs if operand is not None for n in operand.identifiers()}
    return tuple(n for n, mark in bound.marks.items() if n not in given and mark not in UNSPLIT and bound.sizes[n] > 1)


def _searched(
    attempt: _Attempt, signature: Signature, bound: BoundAnnotation, large: Sequence[str], computed: Sequence[str]
) -> Representative | None:
    """Return a small call in which all of `large` divide by 6, those that are computed too.

    What is frozen and small (the size of a kernel) stays.
    """
    (*_, table) = _tables(bound, large)
    frozen = [n for n in bound.sizes if bound.marks.get(n) in UNSPLIT and bound.sizes[n] > LARGEST_KERNEL]
    moved = bound.inputs[0].identifiers() if bound.inputs and bound.inputs[0] is not None else ()
    small = [n for n in moved if bound.marks.get(n) in UNSPLIT]  # a picture of 3 x 3 is as small as a kernel
    for names, size in ((names, size) for names in dict.fromkeys((tuple(frozen), tuple(small))) for size in TRIED):
        call = resized(signature, bound, table | dict.fromkeys(names, size))
        for concrete in with_tensors_for(call, attempt.seed, attempt.counts):
            found = attempt.on(concrete)
            if found is None or found.signature.bound is None:
                continue
            sizes = found.signature.bound.sizes
            if all(sizes[n] % FREE[1] == 0 for n in large) and all(sizes[n] >= FREE[1] for n in computed):
                return found
    return None


def _tied(bound: BoundAnnotation, sizes: dict[str, int]) -> dict[str, int]:
    """Return the members of a concatenation: multiples of one number, equal where they were equal."""
    for names in dict.fromkeys(n for n in bound.tied.values() if len(n) > 1):
        distinct = sorted({bound.sizes[n] for n in names if n in bound.sizes})
        for name in names:
            if name in sizes and sizes[name] > 1:
                sizes[name] = 12 * (1 + distinct.index(bound.sizes[name]))
    return sizes
