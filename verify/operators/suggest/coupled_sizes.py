"""Find the sizes of a call that can only change together.

Dims and integer arguments are doubled. A function that raises on the doubled size of one is given another one doubled
too, the one with which it gets furthest, until it runs: the two sides of a contraction, the heads of a query, a key
and a value, `h=` and the dim that it divides. Shapes alone are looked at; sizes that are equal by coincidence do no
harm, because doubling one without the other shows that they are two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from verify.operators.suggest.call_with_other_tensors_and_integers import Number, Outputs, Question

Element = tuple[int, int] | str  # a dim of a tensor (index, dim), or an argument: an integer, a list of them
Group = frozenset[Element]
MOST_STEPS = 12
LARGE = 1 << 20  # elements; beyond, shapes are tried on the meta device


def size_of(question: Question, element: Element) -> int:
    """Return the size of a dim, or the number that an argument is."""
    if isinstance(element, str):
        return question.number(element)
    return int(question.tensors[element[0]].shape[element[1]])


def elements_of(question: Question) -> list[Element]:
    """Return every dim of 2 and more, then every argument that may be a size."""
    dims: list[Element] = [(i, d) for i, t in enumerate(question.tensors) for d, size in enumerate(t.shape) if size > 1]
    return [*dims, *question.integers, *question.lists]


def find_groups(question: Question) -> tuple[Group, ...]:
    """Return the smallest sets of sizes that can be doubled together, one for each size that can be doubled at all."""
    search = _GroupSearch(_light(question))
    found: dict[Group, None] = {}
    covered: set[Element] = set()
    for element in search.elements:
        if element in covered:
            continue
        group = search.close(element)
        if group is not None:
            found[group] = None
            covered |= group
    return tuple(found)


def growth(question: Question, group: Group) -> Outputs | None:
    """Return the outputs with the sizes of a group doubled; None where it raises."""
    search = _GroupSearch(question)
    tensors, integers = search.doubled(group)
    try:
        return question.run(tensors, integers)
    except Exception:  # noqa: BLE001 - not every value can be doubled
        return None


def _light(question: Question) -> Question:
    """Return the question on the meta device where its tensors are large or its kernels unchecked, and
    it runs there."""
    if question.checked and sum(t.numel() for t in question.tensors) < LARGE:
        return question
    meta = question.changed([t.to("meta") for t in question.tensors], {}, trusted=True)
    return question if meta.steps(meta.tensors, {}) is not None else meta


@dataclass
class _GroupSearch:
    question: Question
    kept: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)
    tried: dict[Group, int | None] = field(default_factory=dict)

    @property
    def elements(self) -> list[Element]:
        return elements_of(self.question)

    def doubled(self, group: Iterable[Element]) -> tuple[list[Tensor], dict[str, Number]]:
        dims: dict[int, list[int]] = {}
        integers: dict[str, Number] = {}
        for element in group:
            if isinstance(element, str):
                integers[element] = self.question.scaled(element, 2)
            else:
                dims.setdefault(element[0], []).append(element[1])
        return [self._tensor(i, tuple(sorted(dims.get(i, ())))) for i in range(len(self.question.tensors))], integers

    def _tensor(self, index: int, dims: tuple[int, ...]) -> Tensor:
        found = self.kept.get((index, dims))
        if found is None:
            found = self.question.tensors[index]
            for dim in dims:
                found = torch.cat([found, found], dim)
            self.kept[index, dims] = found
        return found

    def steps(self, group: Group) -> int | None:
        if group not in self.tried:
            self.tried[group] = self.question.steps(*self.doubled(group))
        return self.tried[group]

    def close(self, seed: Element) -> Group | None:
        """Return the smallest set with `seed` that can be doubled; None if there is none within reach."""
        group: Group = frozenset((seed,))
        for _ in range(MOST_STEPS):
            reached = self.steps(group)
            if reached is None:
                return self._smallest(group, seed)
            further = self._further(group, reached, self._candidates(group, seed))
            if further is None:
                return None
            group = further
        return None

    def _candidates(self, group: Group, seed: Element) -> list[Element]:
        """Return other elements to try, the likeliest first: of the seed's size, of other tensors, dims before
        integers."""
        size = size_of(self.question, seed)
        held = {e[0] for e in group if not isinstance(e, str)}

        def unlikely(element: Element) -> tuple[bool, bool, bool]:
            other = size_of(self.question, element) != size
            return isinstance(element, str), not isinstance(element, str) and element[0] in held, other

        return sorted((e for e in self.elements if e not in group), key=unlikely)

    def _further(self, group: Group, reached: int, candidates: Sequence[Element]) -> Group | None:
        """Return the group with one more element (else all dims of its size, those at one position, two) that gets
        further."""
        best, best_steps = None, reached
        for candidate in candidates:
            steps = self.steps(group | {candidate})
            if steps is None:
                return group | {candidate}
            if steps > best_steps:
                best, best_steps = group | {candidate}, steps
        if best is not None:
            return best
        dims = [c for c in candidates if not isinstance(c, str)]
        sizes = {size_of(self.question, e) for e in group if not isinstance(e, str)}
        alike = [c for c in dims if size_of(self.question, c) in sizes]
        several = [frozenset(alike), *self._aligned(group, alike)]
        several += [frozenset(pair) for pair in combinations(alike[:8], 2)]
        for more in several:
            steps = self.steps(group | more)
            if steps is None or steps > reached:
                return group | more
        return None

    def _aligned(self, group: Group, dims: Sequence[Element]) -> list[Group]:
        """Return all dims of a size at the same place from the front, or from the back."""
        found: list[Group] = []
        for element in group:
            if isinstance(element, str):
                continue
            place = element[1] - self.question.tensors[element[0]].dim()
            same = [d for d in dims if not isinstance(d, str)]
            found.append(frozenset(d for d in same if d[1] == element[1]))
            found.append(frozenset(d for d in same if d[1] - self.question.tensors[d[0]].dim() == place))
        return [f for f in found if f]

    def _smallest(self, group: Group, seed: Element) -> Group:
        """Remove the elements that were not needed."""
        for element in sorted(group - {seed}, key=str):
            if self.steps(group - {element}) is None:
                group = group - {element}
        return group
