"""Every built-in annotation against its operator: each split, pairs of splits, and each linear set.

A new overload is one row in `op_registry/samples/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from op_registry.annotation.sizes import BoundAnnotation
from op_registry.annotation.splits import splittable
from op_registry.bind_call import linear_sets
from op_registry.builtin import SPECS
from op_registry.call import AxisShard
from op_registry.samples import SAMPLES
from op_registry.spec import Refusal

from tests.op_registry.builtin.oracle import Whole, check_partial, check_split, whole

NUMBERS = pytest.mark.parametrize("number", range(len(SAMPLES)), ids=[str(s) for s in SAMPLES])


def test_every_operator_has_a_sample() -> None:
    assert {spec.name for spec in SPECS} - {s.operator for s in SAMPLES} == set()


def test_no_operator_is_annotated_twice() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))


@NUMBERS
def test_what_may_be_split(number: int) -> None:
    bound = whole(number).bound
    assert {name for name in bound.sizes if splittable(bound, name, 2) is None} == SAMPLES[number].splits


@NUMBERS
def test_splits(number: int) -> None:
    w = whole(number)
    for name, parts, outer in _legal(w):
        axis = AxisShard("x", parts, outer)
        if outer > 1 and name in w.spec.contiguous:
            with pytest.raises(Refusal, match="contiguous"):
                check_split(w, {name: (axis,)})
        else:
            check_split(w, {name: (axis,)})


@NUMBERS
def test_two_axes(number: int) -> None:
    w = whole(number)
    names = [name for name in _leaders(w.bound) if splittable(w.bound, name, 6) is None]
    for first, second in combinations(names, 2):
        check_split(w, {first: (AxisShard("x", 2),), second: (AxisShard("y", 3),)})
    for name in names:
        nested = (AxisShard("x", 3, outer=2), AxisShard("y", 2))
        if name in w.spec.contiguous:
            with pytest.raises(Refusal, match="contiguous"):
                check_split(w, {name: nested})
        elif len(w.bound.tied[name]) == 1:
            check_split(w, {name: nested})


@NUMBERS
def test_partial_sums(number: int) -> None:
    w = whole(number)
    for slots in linear_sets(w.spec, w.call):
        assert slots <= set(range(len(w.inputs)))
        check_partial(w, slots, 3)


def _leaders(bound: BoundAnnotation) -> Iterator[str]:
    """One identifier of each set that is split together."""
    return (name for name in bound.sizes if bound.tied[name][0] == name)


def _legal(w: Whole) -> Iterator[tuple[str, int, int]]:
    """(identifier, parts, outer) of every split to try."""
    for name in _leaders(w.bound):
        for parts in (2, 3):
            for outer in (1, 2, 3):
                if splittable(w.bound, name, parts, outer) is None:
                    yield name, parts, outer
