"""Look at a user's operator itself at larger sizes: what it does to its inputs, whether its backward is right there.

Where a proof ends, or numbers in its code hint at it, it may do something else, as a kernel does beyond its first
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

from nnscaler.training.functional_optimizer import Update
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.oracle.annotation_claims import Target
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.oracle.cases_beyond_proved_sizes import beyond_bounds, whole_numbers
from verify.evidence.oracle.enumerate_cases import Base
from verify.evidence.sizes_of_other_ways import Traced, sizes_of_other_ways
from verify.evidence.split_case import Inputs, SplitCase
from verify.operators.audit.check_handwritten_derivative import check_derivative
from verify.operators.audit.side_effects import audit
from verify.operators.audit.watch_effects_on_tensors import Probed, watch_forward
from verify.results.verdict import Strength

_LARGEST_DIFFERENTIATED = 256  # a size at which slopes are measured


class LargerSizes:
    """The cases of a user's operator beyond its proofs. `found`: what it was seen to do to its inputs there."""

    def __init__(self, runner: OperatorRunner) -> None:
        self.runner = runner
        self.found = Probed()
        self._traced: Traced = {}
        self._watched: set[tuple[int | None, tuple[tuple[str, int], ...]]] = set()

    def cases(
        self, pairs: Iterable[tuple[Base, Target, Strength]], left_out: MutableMapping[str, None]
    ) -> Iterator[SplitCase]:
        """Yield the cases of a claim at sizes that its proofs do not cover. `left_out`: notes on what is not tried."""
        for base, target, strength in pairs:
            ways = sizes_of_other_ways(self.runner, base, target, strength, self._traced)
            for case in beyond_bounds(self.runner, base, target, strength, ways, left_out):
                self._watch(case.inputs)
                yield case

    def _watch(self, inputs: Inputs) -> None:
        """Look, once for each of the sizes, whether the operator changes what it is given: that it raises where
        gradients are recorded may be due to it, and then no case is compared."""
        runner, key = self.runner, (inputs.sample, inputs.sizes)
        watched = isinstance(runner.spec.target, Update) or not runner.options.safeguards.audit or key in self._watched
        if watched or self.found.findings:
            return
        self._watched.add(key)
        with suppress(Exception):  # whoever runs the case says so
            call = runner.concrete(inputs)
            function = runner.function(call)
            if watch_forward(function, call).changes:
                self.found = audit(runner.spec, call, inputs.seed, compare=False, strides=False, function=function)


def derivative_and_larger_sizes(runner: OperatorRunner, base: Base) -> Probed:
    """Compare the gradients of a call with differences, where a backward is written by hand; at larger sizes too."""
    further = partial(_larger_calls, runner, base)
    return check_derivative(runner.spec, runner.concrete(base.inputs), runner.options.seed, further)


def _larger_calls(runner: OperatorRunner, base: Base) -> Iterator[tuple[str, ConcreteCall]]:
    """Yield calls with one size just beyond a number that stands in the operator's code, and the reason for each."""
    bound = base.signature.bound
    if runner.spec.target is None or isinstance(runner.spec.target, Update) or bound is None:
        return
    numbers, _ = whole_numbers(runner.spec.target, {})
    for name, number in product(bound.sizes, (n for n in numbers if n <= _LARGEST_DIFFERENTIATED)):
        size = number + 2 - number % 2
        with suppress(Exception):  # sizes that depend on each other; whoever runs the cases says so
            sizes = {**dict(base.inputs.sizes), name: size}
            call = runner.concrete(replace(base.inputs, sizes=tuple(sizes.items())))
            yield f"where `{name}` is {size}, since {number} stands in its code", call
