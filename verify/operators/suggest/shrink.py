"""A call on smaller tensors of the same kinds: sizes that belong together shrink together, found on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.operators.suggest.probe_call import Number, Question, make_question
from verify.operators.suggest.size_groups import Group, find_groups, size_of

LARGE = 1 << 20  # elements of a call; one with more is shrunk
SIZES = (12, 24, 6, 36, 18, 30, 48, 8, 10, 4, 2)


def shrink(spec: OperatorSpec, concrete: ConcreteCall) -> ConcreteCall:
    """Return the call with sizes of our own choice, as far as the function takes them, on tensors with data: the
    beginnings of those given, random numbers for those on the meta device. Raises what the function raises on meta
    tensors of its own shapes."""
    function = function_of(concrete.call.operator, spec)
    question = make_question(spec, function, concrete)
    question = question.changed([t.to("meta") for t in question.tensors], {}, trusted=True)
    question.run(question.tensors, {})
    groups = find_groups(question)
    taken: set[int] = set()
    for group in (g for g in groups if not any(g < other for other in groups)):
        common = gcd(*(size_of(question, e) for e in group))
        for size in sorted((s for s in SIZES if s < common), key=lambda s: s in taken):
            other = _scaled(question, group, size, common)
            if other is not None:
                question = other
                taken.add(size)
                break
    tensors = [_filled(small, given) for small, given in zip(question.tensors, concrete.tensors, strict=True)]
    return question.changed(tensors, {}).concrete


def _scaled(question: Question, group: Group, size: int, common: int) -> Question | None:
    """Return with the group's sizes in proportion, `size` for each `common`; None where that does not run."""
    shapes = [list(t.shape) for t in question.tensors]
    integers: dict[str, Number] = {}
    for element in group:
        if isinstance(element, str):
            integers[element] = question.scaled(element, size, common)
        else:
            index, dim = element
            shapes[index][dim] = shapes[index][dim] // common * size
    other = question.changed([_meta(s, t) for s, t in zip(shapes, question.tensors, strict=True)], integers)
    try:
        other.run(other.tensors, {})
    except Exception:  # noqa: BLE001 - the size was our choice
        return None
    return other


def _meta(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def _filled(small: Tensor, given: Tensor) -> Tensor:
    """Return a tensor with data, of the shape of `small`.

    Whole numbers that are not known are 0 or 1: few operators take none of them.
    """
    if not given.is_meta:
        for dim, size in enumerate(small.shape):
            given = given.narrow(dim, 0, size) if size <= given.shape[dim] else given
        if given.shape == small.shape:
            return given.detach().clone()
    generator = torch.Generator().manual_seed(0)
    if small.dtype.is_floating_point or small.dtype.is_complex:
        return torch.randn(tuple(small.shape), generator=generator, dtype=small.dtype)
    return torch.randint(0, 2, tuple(small.shape), generator=generator).to(small.dtype)
