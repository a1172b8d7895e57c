"""Cases of a user's operator beyond the sizes that its proof covers.

Small sizes say nothing of an operator that does something else from some size on. Where that is, its proof says in the
conditions that it takes for granted, or else the numbers in its code hint at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil, log2, prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from op_registry.errors import AnnotationError
from op_registry.numbers_in_user_code import deciding_numbers_in, numbers_in

from nnscaler.exception_in_one_line import first_line
from nnscaler.training.functional_optimizer import Update
from verify.evidence.operator_trace import Observer
from verify.evidence.oracle.annotation_claims import Target, choice_of, split_by
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.enumerate_cases import Base
from verify.evidence.oracle.tolerance import CEILING
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import Kind
from verify.results.verdict import Strength, Verdict

_LARGEST_BOUND = 1024  # of a size; one alone may be larger
_POWER = 64
_LARGEST_TENSOR = 1 << 21  # elements
_NUMBERS, _DECIDING, _LARGE = 8, 16, 4  # of a function that are tried; more where it decides by them
_SMALL_SIZES = (32, 64)  # that tell how its work grows
_SMALLER = (2.0**-3, 2.0**-6, 2.0**-10)  # values that are tried where larger ones overflow


def beyond_bounds(
    runner: OperatorRunner,
    base: Base,
    target: Target,
    proved: Strength,
    other_ways: Iterable[Mapping[str, int]],
    left_out: MutableMapping[str, None],
) -> Iterator[SplitCase]:
    """Yield cases of a user's operator at sizes that its proof does not cover: `other_ways`, at which it goes another
    way; and of each number in its own code, one where the whole lies beyond it, one where its halves do too, and one
    where all sizes do. None for what is proved for all sizes. `left_out`: notes on what is not tried."""
    bound = base.signature.bound
    if runner.spec.target is None or proved.verdict is Verdict.PROVED_ALL_SIZES or bound is None:
        return
    choice, name = choice_of(target), split_by(target)
    together = bound.tied.get(name, (name,)) if name is not None else ()
    changes = list(_changes(runner.spec.target, bound.sizes, list(other_ways), together, left_out))
    known, growth = dict(base.inputs.sizes), _Growth(runner, base.inputs)
    # all rows in one group, which may have room for some: of one id, or all with the largest score in one place
    gathering: Kind = "constant" if any("int" in t.dtype for t in base.signature.call.tensors()) else "rising"
    for change in {tuple(change.items()): change for change in changes}.values():
        wanted = {**bound.sizes, **change}
        evened = wanted if base.style == "smooth" else together  # what it halves, it does not take odd
        even_too = {name: 2 * wanted[name] for name in evened if wanted[name] % 2}
        if max(change.values()) > _LARGEST_BOUND:
            if len(change) > 1:
                continue
            ((longest, size),) = change.items()
            why = growth.refuses(longest, {**wanted, **even_too}[longest])
            if why:
                left_out[f"`{runner.spec.name}` was not run where `{longest}` is {size}: {why}"] = None
                continue
        elif len(change) > 1 and prod({**wanted, **even_too}.values()) > _LARGEST_TENSOR:
            continue
        inputs = replace(base.inputs, sizes=tuple({**known, **change, **even_too}.items()))
        cases = [SplitCase(tried, (choice,), (2,)) for tried in (inputs, replace(inputs, kind=gathering))]
        yield from _within_range(runner, cases, left_out)


def _changes(
    target: Any,
    sizes: Mapping[str, int],
    other_ways: Sequence[Mapping[str, int]],
    together: Collection[str],
    left_out: MutableMapping[str, None],
) -> Iterator[Mapping[str, int]]:
    """Yield the sizes that are changed, of identifiers; `together` are those that are split."""
    numbers, large = whole_numbers(target, left_out)
    yield from other_ways
    for change, name, number in product(other_ways, together, numbers):  # what else is asked on another way
        yield {name: number + 2 - number % 2, **change}
    for name, number in product(sizes, numbers):
        even = number + 2 - number % 2
        yield from [{name: even}, {name: 2 * even}] if name in together else [{name: even}]
        # what it does at this very size, and at its multiples
        yield from [{name: number}, {name: 2 * number}] if name in together else [{name: number}]
    for name, number in product(sizes, large):
        even = number + 2 - number % 2
        yield from [{name: even}, {name: 2 * even}] if name in together else [{name: even}]
    yield from ({name: _POWER} for name in sizes)  # kernels have a way of their own where sizes are such
    for number in numbers if len(sizes) > 1 else ():  # all at once: the smaller of two sizes lies beyond it then
        even = number + 2 - number % 2
        yield {name: even + 2 * place for place, name in enumerate(sizes)}
    dims = len(sizes)
    for number in _numbers_of_elements(target) if dims > 1 else ():  # the halves have more, too
        side = 2 * ceil((2 * number) ** (1 / dims) / 2)
        yield {name: side + 2 * place for place, name in enumerate(sizes)}


class _Growth:
    """Tells from runs at two small sizes how an operator's work grows with a size."""

    def __init__(self, runner: OperatorRunner, inputs: Inputs) -> None:
        self.runner, self.inputs = runner, inputs
        self.found: dict[str, list[tuple[int, int]]] = {}

    def refuses(self, name: str, size: int) -> str:
        """Return why a size is too large to be run; empty if it is not."""
        if name not in self.found:
            self.found[name] = [self._work(name, small) for small in _SMALL_SIZES]
        (steps, elements), (more_steps, more) = self.found[name]
        if more_steps > steps:
            return "it takes a step for each of so many"
        power = log2(more / elements) / log2(_SMALL_SIZES[1] / _SMALL_SIZES[0])
        return "" if more * (size / _SMALL_SIZES[1]) ** power <= _LARGEST_TENSOR else "its tensors are too large there"

    def _work(self, name: str, size: int) -> tuple[int, int]:
        """Return how many kernels run, and the elements of the largest result."""
        kernels, largest = 0, 1

        def note(_: Any, __: Any, result: Any) -> None:
            nonlocal kernels, largest
            kernels += 1
            largest = max([largest, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])

        sizes = tuple({**dict(self.inputs.sizes), name: size}.items())
        with suppress(Exception), Observer(note):  # where it does not run, the cases will say so
            self.runner.exact(replace(self.inputs, sizes=sizes))
        return kernels, largest


def _within_range(
    runner: OperatorRunner, cases: Iterable[SplitCase], left_out: MutableMapping[str, None]
) -> Iterator[SplitCase]:
    """Yield cases at larger sizes, with smaller values where the whole is not finite or rounds by much: a recurrence
    overflows after many steps, and where shards do is chance. `left_out`: notes on those that are so for all values."""
    for case in cases:
        try:
            whole = runner.prepare(case.inputs).whole
        except AnnotationError as misfit:  # sizes that depend on each other: the half of a dim that rotates pairs
            left_out[f"{first_line(misfit)} at sizes of our choice, which were left out"] = None
            continue
        except Exception:  # noqa: BLE001 - whoever runs the case says so
            yield case
            continue
        count = len(whole.concrete.tensors)
        smaller = (replace(case.inputs, factors=(*(factor,) * count, 1.0)) for factor in _SMALLER)
        inputs = next((tried for tried in (case.inputs, *smaller) if _well_conditioned(runner, tried)), case.inputs)
        if inputs is not case.inputs or whole.comparable or not whole.concrete.compare:
            yield replace(case, inputs=inputs)
        else:
            shapes = ", ".join(str(tuple(t.shape)) for t in whole.concrete.tensors)
            left_out[f"`{runner.spec.name}` is not finite on inputs of shapes {shapes}, which were left out"] = None


def _well_conditioned(runner: OperatorRunner, inputs: Inputs) -> bool:
    try:
        prepared = runner.prepare(inputs)
    except Exception:  # noqa: BLE001 - values were our choice
        return False
    return prepared.whole.finite and prepared.bound.relative < CEILING


def whole_numbers(target: Any, left_out: MutableMapping[str, None]) -> tuple[list[int], list[int]]:
    """Return the whole numbers above 1 that stand in the code of an operator or of an optimizer, some at most: those
    that one size may be among others, and those by which it decides that only one size alone may be."""
    every = [n for n in reversed(_all_numbers(target)) if 1 < n <= _LARGEST_TENSOR]
    deciding = set(every) if isinstance(target, Update) else deciding_numbers_in(target)
    small = sorted((n for n in every if n <= _LARGEST_BOUND), key=lambda n: n not in deciding)
    count = max(_NUMBERS, min(_DECIDING, sum(n in deciding for n in small)))
    large = [n for n in every if n > _LARGEST_BOUND and n in deciding]
    if cut := [*small[count:], *large[_LARGE:]]:
        shown = ", ".join(map(str, sorted(cut)[:_NUMBERS]))
        left_out[f"of the numbers in its code, {shown} were not tried as sizes"] = None
    return small[:count], large[:_LARGE]


def _numbers_of_elements(target: Any) -> list[int]:
    """Return the whole numbers in an operator's code that are too large for one size, some at most: it may count
    elements."""
    return (
        []
        if isinstance(target, Update)
        else [n for n in _all_numbers(target) if _LARGEST_BOUND < n <= _LARGEST_TENSOR // 4][:_NUMBERS]
    )


def _all_numbers(target: Any) -> list[int]:
    if isinstance(target, Update):  # a hyper-parameter may be 128.0
        return sorted({int(n) for n in target.numbers if n == n // 1})
    return [n for n in numbers_in(target) if isinstance(n, int)]
