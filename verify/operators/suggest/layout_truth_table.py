"""Infer how a function maps input layouts to output layouts: factors of dims from its views, states by running pieces.
A fact says: with its inputs in these states (equal, a shard of a dim, terms of a sum), its outputs are in those. Facts
are not enumerated blindly: sizes that can only change together are split together, integers that divide a dim are
tried with it, and a sum whose terms are too many is tried with one more operand as a sum. What is found in 2 parts is
run again in 3, on other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from nnscaler.layout import PARTIAL, REPLICATED, Partial, Replicated, Sharded, State
from verify.evidence.operator_trace import Observer
from verify.operators.suggest.call_with_other_tensors_and_integers import Outputs, Question
from verify.operators.suggest.coupled_sizes import Element, Group, find_groups, size_of
from verify.operators.suggest.sharded_run import States, Trial, close, divides, make_trial

# Find the factors that a function makes of its dims, from the views, splits and slices that it runs.

Outers = Mapping[int, tuple[int, ...]]


def find_outers(question: Question) -> Outers:
    """Return, by size of a dim, what may stand before an identifier in it: 3 and 3 * h for a dim
    viewed as (3, h, d)."""
    outers: dict[int, set[int]] = {}

    def note(overload: Any, args: tuple[Any, ...], result: Any) -> None:
        for size, outer in _found(overload, args, result):
            outers.setdefault(size, set()).add(outer)

    with Observer(note):
        question.run(question.tensors, {})
    return {size: tuple(sorted(found)) for size, found in outers.items()}


def _found(overload: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[int, int]]:
    """Yield a size and what may stand before an identifier in it, for one ATen operator that ran."""
    if not args or not isinstance(args[0], Tensor):
        return
    before = tuple(args[0].shape)
    name = overload.overloadpacket.__name__
    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        yield from _prefixes(before, tuple(result.shape))
    elif name == "slice":
        yield from _shares(before, [result])
    elif name in ("split", "split_with_sizes", "chunk"):
        yield from _shares(before, result)


def _prefixes(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield, for every run of dims that become other dims, their product, and the product of the first few."""
    left = right = 0
    while left < len(before) and right < len(after):
        ends = [left + 1, right + 1]
        products = [before[left], after[right]]
        inner: list[int] = [] if products[0] == products[1] else list(products)
        while products[0] != products[1]:
            side = 0 if products[0] < products[1] else 1
            shape = (before, after)[side]
            if ends[side] == len(shape):
                return
            products[side] *= shape[ends[side]]
            ends[side] += 1
            inner.append(products[side])
        for outer in inner:
            if 1 < outer < products[0] and products[0] % outer == 0:
                yield products[0], outer
        left, right = ends


def _shares(before: Sequence[int], pieces: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield, for a dim that is cut into equal pieces, its size and the number of pieces."""
    for piece in pieces[:1]:
        for size, part in zip(before, piece.shape, strict=False):
            if 1 < part < size and size % part == 0:
                yield size, size // part


MOST_WAYS = 96  # of choosing factors in one set of dims
USUAL = (2, 3)  # outer factors to try where no view shows one: gates, packed projections
MOST_GROUPS = 5  # that one integer may divide


@dataclass(frozen=True, slots=True)
class Fact:
    """Inputs in these states give outputs in those, when the named integers are divided by the number of parts.

    A state of an output is None where it is not a tensor. `tail`: elements that stay together, where the split is not
    at any place.
    """

    inputs: tuple[State, ...]
    outputs: States
    integers: frozenset[str] = frozenset()
    tail: int = 1

    @property
    def splits(self) -> bool:
        """Return whether an annotation's mark can express the fact: every output is a shard, or a term of one kind of
        reduction."""
        present = [o for o in self.outputs if o is not None]
        reductions = {o.reduction for o in present if isinstance(o, Partial)}
        return bool(present) and not any(isinstance(o, Replicated) for o in present) and len(reductions) <= 1


def truth_table(question: Question, groups: Sequence[Group] | None = None) -> tuple[Fact, ...]:
    """Return every way found of splitting something, at most one for each set of sizes and each factor.

    The sizes of the question should divide by 6; `groups`: see `find_groups`.
    """
    trial = make_trial(question)
    if trial is None:
        return ()
    outers = find_outers(question)
    found = _Table(trial, find_groups(question) if groups is None else groups, outers).fill()
    other = make_trial(question, seed=1, kind="integers")
    if other is None:
        return ()
    return tuple(with_tail(other, fact, outers) for fact in found if holds(other, fact, 3))


def holds(trial: Trial, fact: Fact, parts: int) -> bool:
    """Return whether a fact holds in that many parts, or in 2 where the sizes do not divide by them."""
    question = trial.question
    fits = all(divides(s, t.shape, parts) for s, t in zip(fact.inputs, trial.tensors, strict=True))
    if not fits or any(question.integers[n] % parts for n in fact.integers):
        parts = 2
    ranks = trial.run(fact.inputs, parts, {n: question.integers[n] // parts for n in fact.integers})
    return ranks is not None and trial.read(ranks, _sections(fact)) == fact.outputs


def with_tail(trial: Trial, fact: Fact, outers: Outers) -> Fact:
    """Return the fact with the fewest elements that stay together when it is split at other places than the middle."""
    dims = [(i, s) for i, s in enumerate(fact.inputs) if isinstance(s, Sharded)]
    if fact.integers or not dims or _sections(fact):
        return fact
    sizes = {trial.tensors[i].shape[s.dim]: s.outer for i, s in dims}
    length = min(size // outer for size, outer in sizes.items())
    tails = sorted({size // o for size in sizes for o in outers.get(size, ()) if length % (size // o) == 0})
    for tail in (1, *tails):
        if length // tail > 2 and trial.run_unevenly(fact.inputs, fact.outputs, length // tail):
            return replace(fact, tail=tail)
    return fact


def _sections(fact: Fact) -> list[tuple[int, ...]]:
    return [s.sections for s in fact.outputs if isinstance(s, Sharded) and s.sections]


@dataclass
class _Table:
    trial: Trial
    groups: Sequence[Group]
    outers: Outers
    facts: dict[Fact, None] = field(default_factory=dict)
    plain: set[Group] = field(default_factory=set)  # groups whose dims are one identifier

    def fill(self) -> tuple[Fact, ...]:
        for group in self.groups:
            if self._add(self._places(group), group):
                self.plain.add(group)
        for group in self._open():
            self._inner_factors(group)
        for name in self.trial.question.integers:
            if not any(name in f.integers for f in self.facts):
                self._divided(name)
        self._joined()
        return tuple(self.facts)

    def _open(self) -> list[Group]:
        """Return the groups of which the dims as a whole cannot be split."""
        return [g for g in self.groups if g not in self.plain]

    def _places(self, group: Group, outers: Sequence[int] = ()) -> dict[int, Sharded] | None:
        """Return where a split of a group lies on each tensor; None if a tensor has two of its dims."""
        dims = _dims(group)
        if len({index for index, _ in dims}) < len(dims):
            return None
        chosen = outers or (1,) * len(dims)
        return {index: Sharded(dim, outer) for (index, dim), outer in zip(dims, chosen, strict=True)}

    def _add(self, places: dict[int, Sharded] | None, group: Group, needed: bool = False) -> bool:
        """Try one split; `needed`: only if it fails with its integers as they are."""
        if places is None:
            return False
        names = frozenset(e for e in group if isinstance(e, str))
        if not names <= set(self.trial.question.integers):
            return False
        fact = self._fact(places, names)
        if fact is None or (needed and self._fact(places, frozenset()) is not None):
            return False
        self.facts[fact] = None
        return True

    def _fact(self, places: dict[int, Sharded], names: frozenset[str]) -> Fact | None:
        trial, integers = self.trial, self.trial.question.integers
        states: list[State] = [places.get(i, REPLICATED) for i in range(len(trial.tensors))]
        if not all(divides(s, t.shape, 2) for s, t in zip(states, trial.tensors, strict=True)):
            return None
        if any(integers[n] % 2 for n in names):
            return None
        halved = {n: integers[n] // 2 for n in names}
        sections = self._section_sizes(places)
        for terms in self._terms(places):
            tried = tuple(PARTIAL if i in terms else s for i, s in enumerate(states))
            ranks = trial.run(tried, 2, halved)
            if ranks is None:
                return None
            outputs = trial.read(ranks, sections)
            if outputs is not None:
                fact = Fact(tried, outputs, names)
                return fact if fact.splits else None
            if not self._may_sum(ranks):
                return None
        return None

    def _may_sum(self, ranks: Sequence[Sequence[object]]) -> bool:
        """Return whether some output has its full shape, and so may be a sum."""
        shapes = [getattr(o, "shape", None) for o in ranks[0]]
        return any(o is not None and s == o.shape for s, o in zip(shapes, self.trial.outputs, strict=False))

    def _terms(self, places: dict[int, Sharded]) -> Iterator[tuple[int, ...]]:
        """Yield operands to hand in as terms of a sum: none, one, two, three, all that may be."""
        yield ()
        others = [i for i in self._additive if i not in places]
        for i in others:
            yield (i,)
        yield from combinations(others[:6], 2)
        yield from combinations(others[:6], 3)
        if len(others) > 3:
            yield tuple(others)

    @cached_property
    def _additive(self) -> tuple[int, ...]:
        """Tensors of which something is added to the rest: the function is affine in them, and not linear."""
        return tuple(i for i, t in enumerate(self.trial.tensors) if t.is_floating_point() and self._is_affine(i))

    def _is_affine(self, index: int) -> bool:
        trial = self.trial
        whole, (first, second) = trial.tensors[index], trial.pieces(index, PARTIAL, 2)
        values: list[Outputs] = []
        for value in (torch.zeros_like(whole), first, second):
            try:
                values.append(trial.question.run([*trial.tensors[:index], value, *trial.tensors[index + 1 :]], {}))
            except Exception:  # noqa: BLE001 - values were our choice
                return False
        rest = False
        for total, none, a, b in zip(trial.outputs, *values, strict=True):
            if total is None or none is None or a is None or b is None or total.dtype == torch.bool:
                continue
            if not close(a + b - none, total):
                return False
            rest = rest or bool(none.any())
        return rest

    def _section_sizes(self, places: dict[int, Sharded]) -> list[tuple[int, ...]]:
        """Return the sizes of the split dims, which an output may concatenate."""
        sizes = tuple(self.trial.tensors[i].shape[s.dim] for i, s in sorted(places.items()))
        return [sizes, sizes[::-1]] if 1 < len(sizes) <= 4 else []

    def _inner_factors(self, group: Group) -> None:
        """Find splits behind an outer factor, such as `e` in `(h e)`."""
        found: list[tuple[int, ...]] = []
        for outers in self._ways(group):
            if all(o == 1 for o in outers) or any(_implied(outers, f) for f in found):
                continue
            if self._add(self._places(group, outers), group):
                found.append(outers)

    def _ways(self, group: Group) -> Iterator[tuple[int, ...]]:
        """Yield outer factors for the dims of a group; all 1 first."""
        sizes = [self.trial.tensors[i].shape[d] for i, d in _dims(group)]
        usual = USUAL if len(sizes) <= 2 else ()
        choices = [(1, *self.outers.get(size, usual)) for size in sizes]
        for count, outers in enumerate(product(*choices)):
            if count == MOST_WAYS:
                return
            yield outers

    def _divided(self, name: str) -> None:
        """Find the dims that an integer argument divides: of its own group, and of any others together."""
        own = next((g for g in self.groups if name in g), frozenset((name,)))
        others = [g for g in self._open() if g != own and not any(isinstance(e, str) for e in g)]
        others = [g for g in others if any(self._touches(name, e) for e in g)][:MOST_GROUPS]
        for count in range(len(others) + 1):
            for chosen in combinations(others, count):
                group = own.union(*chosen)
                for outers in self._ways(group):
                    if self._add(self._places(group, outers), group, needed=True):
                        return

    def _touches(self, name: str, element: Element) -> bool:
        """Return whether an integer argument may be a factor of the size."""
        return size_of(self.trial.question, element) % self.trial.question.integers[name] == 0

    def _joined(self) -> None:
        """Find groups that can only be split together, though shapes do not say so: concatenated ones, for example."""
        rest = [g for g in self._open() if not any(isinstance(e, str) for e in g)]
        sets = [*combinations(rest[:6], 2), *combinations(rest[:6], 3), *([tuple(rest)] if len(rest) > 3 else [])]
        for chosen in sets:
            group = frozenset().union(*chosen)
            places = self._places(group)
            if places is None or any(f.inputs[i] == s for f in self.facts for i, s in places.items()):
                continue
            self._add(places, group)


def _dims(group: Group) -> list[tuple[int, int]]:
    return sorted(e for e in group if not isinstance(e, str))


def _implied(outers: Sequence[int], found: Sequence[int]) -> bool:
    """Return whether a split refines one already found: all outer factors are larger by the same whole number."""
    ratios = {a / b for a, b in zip(outers, found, strict=True)}
    return len(ratios) == 1 and ratios.pop().is_integer()
