"""Explain a wrong gradient, where simple arithmetic on it tells the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from nnscaler.layout import Sharded
from nnscaler.runtime.shards import Coordinates, unravel
from verify.programs.checks.logical_tensors import Holding, StageTensor
from verify.results.tolerance import difference, largest

CLOSE = 1e-6


def multiple_of_right(
    factor: float, more: str, less: str, sizes: Mapping[str, int], told: str = " (the size of {})", close: float = CLOSE
) -> str | None:
    """Return a sentence on what is n times, or one n-th of, the right one, n from 2 to 64; None for another factor.

    `more`, `less`: how the two end, with {n} for n; `told`: of the axes whose size is n, between.
    """
    for n in range(2, 65):
        axes = " or ".join(axis for axis, size in sizes.items() if size == n)
        over = told.format(axes) if axes else ""
        if abs(factor - n) < close * n:
            return f"it is {n} times the model's{over}{more.format(n=n)}"
        if abs(factor * n - 1) < close:
            return f"it is 1/{n} of the model's{over}{less.format(n=n)}"
    return None


def likely_cause(
    logical: StageTensor, expected: Tensor, tied: Sequence[StageTensor] = (), before: Tensor | None = None
) -> str | None:
    """Return a sentence when the wrong value is a simple function of the right one; None otherwise.

    `tied`: the same parameter as every stage holds it, this one included. `before`: the gradient of the step before.
    """
    value = logical.value
    if value is None or not value.numel() or value.shape != expected.shape or not largest(expected) > 0:
        return None
    if largest(value) == 0:
        return "the gradient is zero everywhere: nothing was added to it"
    if before is not None and difference(value.double(), expected.double() + before.double()).relative < CLOSE:
        return "the gradient of the step before is added to it: the buffer of gradients was not cleared"
    return (
        _untied(tied, expected)
        or _factor(logical, expected)
        or _unsummed(logical, expected)
        or _order(logical, expected)
    )


def _untied(tied: Sequence[StageTensor], expected: Tensor) -> str | None:
    """Test the cause that each stage has only its own part of the gradient of a tied parameter."""
    values = [logical.value.double() for logical in tied if logical.value is not None]
    if len(values) < 2 or difference(torch.stack(values).sum(0), expected.double()).relative > CLOSE:
        return None
    stages = " and ".join(str(logical.holding.stage) for logical in tied)
    return f"stages {stages} share it, and each has only its own part: the sum over its copies is missing"


def _factor(logical: StageTensor, expected: Tensor) -> str | None:
    """Test the cause that the value is n times, or one n-th of, the right one."""
    assert logical.value is not None
    value, right = logical.value.double(), expected.double()
    factor = float((value * right).sum() / (right * right).sum())
    if difference(value, factor * right).relative > CLOSE:
        return None
    if abs(factor - 1) < 1e-3:
        return None
    more, less = ": summed once too often", ": averaged where it should be summed"
    return multiple_of_right(factor, more, less, logical.holding.axes) or f"it is {factor:.6g} times the model's"


def _unsummed(logical: StageTensor, expected: Tensor) -> str | None:
    """Test the cause that the ranks of an axis hold parts of a sum that nobody took."""
    holding = logical.holding
    for axis, size in holding.axes.items():
        if size == 1 or axis in holding.states or logical.pieces is None:
            continue
        total = _summed_over(holding, logical.pieces, axis)
        right = _own_piece(holding, expected)
        if total is not None and right is not None and difference(total, right).relative < CLOSE:
            declared = "" if axis in holding.reduce else f", and its reduce={holding.reduce} does not name {axis}"
            return f"the ranks of axis {axis} hold parts of a sum: an all_reduce over {axis} is missing{declared}"
    return None


def _summed_over(holding: Holding, pieces: Mapping[int, Tensor], axis: str) -> Tensor | None:
    """Return the sum over `axis` of the pieces at coordinate 0 of every other axis."""
    chosen = [
        pieces[rank].double()
        for position, rank in enumerate(holding.ranks)
        if all(index == 0 for other, index in unravel(position, holding.axes).items() if other != axis)
    ]
    return torch.stack(chosen).sum(0) if chosen else None


def _own_piece(holding: Holding, expected: Tensor) -> Tensor | None:
    from nnscaler.runtime.shards import shard

    first: Coordinates = dict.fromkeys(holding.axes, 0)
    try:
        return shard(expected.double(), holding.states, holding.axes, first)
    except ValueError:
        return None


def _order(logical: StageTensor, expected: Tensor) -> str | None:
    """Test the cause that the right shards are in the wrong order along a sharded dim."""
    assert logical.value is not None
    for axis, state in logical.holding.states.items():
        parts = logical.holding.axes.get(axis, 1)
        if not isinstance(state, Sharded) or parts < 2 or parts > 8 or logical.value.shape[state.dim] % parts:
            continue
        blocks = logical.value.double().chunk(parts, state.dim)
        rights = expected.double().chunk(parts, state.dim)
        order = []
        for block, candidate in product(range(parts), range(parts)):
            if difference(blocks[block], rights[candidate]).relative < CLOSE:
                order.append(candidate)
        if len(order) == parts and sorted(order) == list(range(parts)) and order != list(range(parts)):
            return f"its shards along dim {state.dim} are those of the model in the order {order}"
    return None
