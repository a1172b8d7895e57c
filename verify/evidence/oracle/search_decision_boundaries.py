"""Inputs of a user's operator on both sides of whatever it decides by values.

Usual draws say nothing of an operator that does something else beyond a number (of a maximum, a norm, a share), on one
NaN, on zeros. Inputs and cotangents are made larger and smaller step by step while its decisions are watched, and
where they change the two sides are brought together: the whole has crossed then, and shards that know less have not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from math import ceil, inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from op_registry.numbers_in_user_code import numbers_in, signed_numbers_in
from op_registry.spec import OperatorSpec

from nnscaler.training.functional_optimizer import Update
from verify.evidence.inputs.concrete_call import with_tensors
from verify.evidence.inputs.draw_values import in_order
from verify.evidence.inputs.meta_preflight import succeeds
from verify.evidence.oracle.annotation_claims import Target, choice_of, split_by
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner
from verify.evidence.oracle.check_by_cases import TargetOutcome, run_cases
from verify.evidence.oracle.enumerate_cases import Base, Enumerator
from verify.evidence.oracle.run_whole_operator import WholeRun
from verify.evidence.oracle.size_checked_kernels import runs_checked
from verify.evidence.oracle.tolerance import CEILING
from verify.evidence.oracle.watch_value_decisions import Decisions, WatchedRuns
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import KINDS, NOT_FINITE, SPECIAL, Kind
from verify.results.verdict import Strength, Verdict

# Numbers among the ids that mean something of their own: an ignored label, padding, the end of a text.
#
# Ids are drawn from 0 up to the size of a table. An operator that leaves some of them out, and divides by how many are
# left, is right on all of these and wrong where shards leave out unequal numbers of them.


ALWAYS = (-100, -1)  # defaults inside of torch, and free places of caches: they need not stand in a user's code
LARGEST_ID = 1 << 18  # a vocabulary; some code makes as many elements as the largest id says
OPERANDS = 4  # that are changed
NUMBERS = 24  # of one operand that are tried
TOGETHER = 3  # in one draw: there is room for so many in a dozen elements
DRAWN_IDS = 4


def sentinel_inputs(runner: OperatorRunner, inputs: Inputs) -> Iterator[Inputs]:
    """Yield these inputs with sentinels in each operand that holds ids, and in all of them. Numbers on which the whole
    operator raises are left out: they are no ids of it."""
    try:
        usual = runner.exact(inputs)
    except Exception:  # noqa: BLE001 - sizes were our choice
        return
    groups: list[Sequence[tuple[int, float]]] = []
    trial = _Trial(runner, inputs, usual)
    for index in islice(_holding_ids(runner, inputs, usual), OPERANDS):
        tensor = usual.concrete.tensors[index]
        wanted = (n for n in _numbers(runner.spec.target) if _new(tensor, n))
        taken = [(index, n) for n in islice(wanted, NUMBERS) if trial.takes(index, n)]
        groups += [taken[i : i + TOGETHER] for i in range(0, len(taken), TOGETHER)]
    by_operand = {group[0][0]: group for group in reversed(groups)}
    if len(by_operand) > 1:
        groups.append([pair for group in by_operand.values() for pair in group])
    for group in groups:
        for draw in range(DRAWN_IDS):
            kind = KINDS[draw % len(KINDS)] if inputs.kind != "given" else inputs.kind
            yield replace(inputs, kind=kind, seed=inputs.seed + draw, sentinels=tuple(group))


def _numbers(target: Any) -> Iterator[int]:
    """Yield numbers that may be sentinels: those that are so anywhere, and those of the code, with their neighbours
    (one less than the size of a vocabulary, say), negative ones first, then large ones."""
    own = [int(n) for n in signed_numbers_in(target) if n == n // 1 and abs(n) <= LARGEST_ID]
    near = [n + d for n in sorted(own, reverse=True) for d in (0, -1, 1) if n > 0]
    yield from dict.fromkeys((*ALWAYS, *(n for n in own if n < 0), *near))


def _holding_ids(runner: OperatorRunner, inputs: Inputs, usual: WholeRun) -> Iterator[int]:
    """Yield the operands that hold ids: integers, and floating numbers through which no gradient flows. Offsets, whose
    order is their meaning, are none."""
    for index, tensor in enumerate(usual.concrete.tensors):
        ids = tensor.dtype != torch.bool and not tensor.is_complex()
        if tensor.is_floating_point():
            ids = usual.gradients[index] is None and index not in inputs.without_gradient
        elif runner.given:
            ids = ids and not in_order(tensor)
        if ids and tensor.numel() > 1:
            yield index


def _new(tensor: Tensor, number: int) -> bool:
    """Return whether a tensor can hold a number, and does not yet."""
    if not tensor.is_floating_point():
        limits = torch.iinfo(tensor.dtype)
        if not limits.min <= number <= limits.max:
            return False
    return not bool((tensor == number).any())


class _Trial:
    """Tries the whole operator on one sentinel at a time."""

    def __init__(self, runner: OperatorRunner, inputs: Inputs, usual: WholeRun) -> None:
        self.runner, self.inputs = runner, inputs
        self.shapes = [_shape(o) for o in usual.outputs]
        # in the others an id out of range may end the process
        self.checked = runs_checked(lambda: runner.exact(inputs))

    def takes(self, index: int, number: float) -> bool:
        """Return whether the operator runs with a number among its ids, and its results have the same shapes."""
        tried = replace(self.inputs, sentinels=((index, number),))
        if not self.checked and not succeeds(lambda: self._forward(tried)):
            return False
        try:
            return [_shape(o) for o in self.runner.exact(tried).outputs] == self.shapes
        except Exception:  # noqa: BLE001 - it is no id of this operator
            return False

    def _forward(self, inputs: Inputs) -> None:
        call = self.runner.concrete(inputs)
        args, kwargs = with_tensors(call.call, call.tensors, {})
        with torch.no_grad():
            self.runner.function(call)(*args, **kwargs)


def _shape(output: Tensor | None) -> tuple[int, ...] | None:
    return None if output is None else tuple(output.shape)


# Decisions.


FACTORS = (*(10.0**k for k in (-12, -9, -7)), *(10.0 ** (k / 2) for k in range(-12, 13)), 1e7, 1e9, 1e12)
STEPPED = (1e-9, 1e-4, 1e-2, 1e2, 1e4, 1e9)  # tried as they are too: what is continuous decides nothing
NEAR = 1.01  # the two sides of a decision
DECIDED = 1e-6  # relative: far below what a decision changes
CROSSINGS = 8  # of one way
ALONE = 4  # operands that are changed each alone
STEPS = 1_000_000  # of watched runs, for one claim: bytecodes and operators
PARTS = (2, 3)
ENDLESS = 20  # times as many steps as on usual values
SHARES = (1e-4, 0.2)  # numbers in the code that may be shares of elements: of so many that a few are beyond
LARGEST = 1 << 16  # elements

Forms = Callable[[Inputs], Iterable[SplitCase]]
Way = Callable[[float], Inputs]


def try_values(runner: OperatorRunner, base: Base, target: Target, proved: Strength) -> TargetOutcome:
    """Run one target of a sample call on such values; nothing of what is proved, as that is of all values. What is
    proved at small sizes is run at those only at which a share of the elements is a few."""
    if proved.verdict is Verdict.PROVED_ALL_SIZES or not has_own_values(runner.spec):
        return TargetOutcome()
    choice, split = choice_of(target), split_by(target)
    sizes = dict(Enumerator(runner, base).sizes_for([target]))
    search = ValueSearch(runner, lambda tried: (SplitCase(tried, (choice,), (parts,)) for parts in PARTS))
    if proved.verdict is Verdict.TESTED_EXACT:
        inputs = replace(base.inputs, sizes=tuple(sizes.items()))
        for tried in sentinel_inputs(runner, inputs):
            search.well_conditioned(tried)
        search.all_of(inputs)
    assert base.signature.bound is not None
    full = {**base.signature.bound.sizes, **sizes}
    for share in (n for n in numbers_in(runner.spec.target) if SHARES[0] <= n <= SHARES[1]):
        if split is None:
            break
        others = prod(full.values()) // full[split]
        size = 12 * ceil(1.5 / share / others / 12)
        if size * others <= LARGEST:
            larger = replace(base.inputs, sizes=tuple({**sizes, split: size}.items()))
            search.along(next(search.ways(larger)))
    return search.outcome


def has_own_values(spec: OperatorSpec) -> bool:
    """Return whether an operator may ask for values: none of ours does, and an optimizer's are tried elsewhere."""
    return spec.target is not None and not spec.random and not isinstance(spec.target, Update)


class ValueSearch:
    """Runs the cases that `forms` makes of inputs, and collects what they show. Does nothing more after a failure, or
    when its work is spent."""

    def __init__(self, runner: OperatorRunner, forms: Forms) -> None:
        self.runner, self.forms = runner, forms
        self.outcome, self.watched = TargetOutcome(), WatchedRuns()

    def all_of(self, inputs: Inputs) -> None:
        """Run special values, and the two sides of each decision, along every way."""
        self.special(inputs)
        for way in self.ways(inputs):
            self.along(way)
        self.outcome.unseen = tuple(dict.fromkeys(self.watched.one_sided()))

    def over(self) -> bool:
        """Return whether enough is known, or no work is left."""
        self.outcome.cut |= self.watched.steps > STEPS
        budget = self.runner.options.cases
        return bool(self.outcome.failures) or self.outcome.cut or (budget or inf) <= self.outcome.cases

    def decided(self, inputs: Inputs) -> Decisions | None:
        return self.watched.decisions(lambda: self.runner.exact(inputs))

    def special(self, inputs: Inputs) -> None:
        """Run kinds of values that some code asks for, wherever the whole runs. Where nothing is decided otherwise by
        what is not finite, arithmetic alone carries it on: `x + 0 * x.sum()` is x for every number."""
        usual = [self.decided(replace(inputs, kind=kind)) or () for kind in (*KINDS, "given")]
        self.watched.most = ENDLESS * max(1000, *map(len, usual))
        known = {*map(_decisive, usual)}
        count = len(self.runner.concrete(inputs).tensors)
        for kind in SPECIAL:
            for factors in ((), (*(-1.0,) * count, 1.0)):
                tried = replace(inputs, kind=kind, factors=factors)
                decided = None if self.over() else self.decided(tried)
                if decided is not None and (kind not in NOT_FINITE or _decisive(decided) not in known):
                    self.run(tried)

    def run(self, inputs: Inputs) -> None:
        """Run the cases of inputs; stop at one that differs by more than rounding, of which little is known where
        values are large: a saturated softmax cancels most of its gradient."""
        for case in self.forms(inputs):
            found = run_cases(self.runner, [case])
            found.failures = [failed for failed in found.failures if _differs(failed)]
            self.outcome.add_beyond(found)
            if self.over():
                return

    def along(self, way: Way) -> None:
        """Run a few factors as they are, and the two sides of wherever decisions change."""
        for factor in STEPPED:
            self.well_conditioned(way(factor))
        if self.over() or not _by_values(self.decided(way(1.0))):
            return
        decided = cache(lambda factor: self.decided(way(factor)))
        steps = pairwise(FACTORS)
        changes = (change for low, high in steps for change in _changes(decided, low, high))
        for low, high in islice(changes, CROSSINGS):
            self.well_conditioned(way(low))
            self.well_conditioned(way(high))
            if self.over():
                return

    def well_conditioned(self, inputs: Inputs) -> None:
        """Run the cases where the whole is finite, and its rounding small enough to compare with."""
        if self.over() or self.decided(inputs) is None:
            return
        try:
            prepared = self.runner.prepare(inputs)
        except Exception:  # noqa: BLE001 - values were our choice
            return
        if prepared.whole.finite and prepared.bound.relative < CEILING:
            self.run(inputs)

    def ways(self, inputs: Inputs) -> Iterator[Way]:
        """Yield ways of making inputs of a factor: of all tensors with values of a kind, of cotangents, of one."""
        count = len(self.runner.concrete(inputs).tensors)

        def way(kind: Kind, grown: frozenset[int]) -> Way:
            return lambda factor: replace(
                inputs, kind=kind, factors=tuple(factor if i in grown else 1.0 for i in range(count + 1))
            )

        every = frozenset(range(count))
        yield way("normal", every)
        yield way("normal", frozenset({count}))
        for kind in ("spiked", "positive", "negative"):
            yield way(kind, every)
        for index in range(count if 1 < count <= ALONE else 0):
            yield way("normal", frozenset({index}))


def _differs(failed: CaseResult) -> bool:
    mismatches = () if failed.compared is None else failed.compared.mismatches
    return failed.raised is not None or any(not m.difference.relative <= DECIDED for m in mismatches)


def _decisive(decisions: Decisions) -> Decisions:
    """Leave out the operators that compare nothing, among which are those that draw the inputs."""
    return tuple(d for d in decisions if not isinstance(d, tuple) or d[1] is not None)


def _by_values(decisions: Decisions | None) -> bool:
    """Return whether anything was compared; where the operator raises, that may be so."""
    return decisions is None or any(isinstance(d, tuple) and d[1] is not None for d in decisions)


def _changes(decided: Callable[[float], object], low: float, high: float) -> Iterator[tuple[float, float]]:
    """Yield the two sides of wherever decisions change between two factors, as far as halving tells."""
    if decided(low) == decided(high):
        return
    if high < low * NEAR:
        yield low, high
        return
    middle = sqrt(low * high)
    yield from _changes(decided, low, middle)
    yield from _changes(decided, middle, high)
