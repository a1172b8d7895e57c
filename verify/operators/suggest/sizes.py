"""Sizes to ask a question on: small, different from each other, and divisible by 2 and 3 with more than one element
left in each shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch
from torch import Tensor

from verify.operators.suggest.probe_call import Number, Question
from verify.operators.suggest.size_groups import Element, Group, size_of
from verify.results.tensor_difference import is_finite

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
