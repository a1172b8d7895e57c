"""Try on real values whether pieces of a parameter become under an optimizer what the whole becomes.

Small parameters and few steps show what it does at these. An optimizer may do something else after a warm-up, of large
gradients or of large parameters: where, the numbers in its code hint at, and further trials go beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from nnscaler.training.functional_optimizer import (
    SIZES,
    OptimizerClass,
    drawn,
    own_numbers,
    scales_beyond,
    steps_beyond,
    steps_far_beyond,
    trajectory,
)

STEPS = 12  # of a test: at the 6th RAdam changes its formula
TOLERANCE = 1e-12  # relative and absolute: vector units round the elements at an end of a row otherwise
_LARGEST_SIZE = 1024
_LARGEST_TENSOR = 1 << 20  # elements of a parameter with one dim or two
_LARGEST_OF_MORE = 1 << 17
_OTHER_DIMS = (2, 3, 4)  # sizes beside large ones
_LARGE_STEPS = 3  # of a large parameter
_NUMBERS = 8  # of one kind that are tried
_SMALLEST = 1e-4  # of the norms of gradients

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class UpdateTrial:
    """Runs an optimizer on a parameter of one shape and on pieces of it, with the same values each time.

    steps     how many
    scales    what gradients are multiplied by, in the order of the steps, equally many of each
    size      what the parameter's values are multiplied by
    thorough  whether every piece is tried, or two of them
    skipped   steps that are left out after two: counters are set forward
    """

    cls: OptimizerClass
    defaults: Mapping[str, Any]
    shape: tuple[int, ...]
    steps: int = STEPS
    scales: tuple[float, ...] = (1.0,)
    size: float = 1.0
    thorough: bool = False
    skipped: int = 0

    @cached_property
    def values(self) -> tuple[Tensor, list[Tensor]]:
        """Return the parameter at the start, and its gradients."""
        generator = torch.Generator().manual_seed(0)
        value = drawn(self.shape, generator) * self.size
        gradients = [drawn(self.shape, generator) * 3.0 ** (step % 3 - 1) for step in range(self.steps)]
        each = [self.scales[step * len(self.scales) // self.steps] for step in range(self.steps)]
        return value, [g * scale for g, scale in zip(gradients, each, strict=True)]

    def run(self, views: Sequence[View]) -> list[dict[str, Tensor]]:
        """Run it on one parameter for each view, and return what became of each."""
        value, gradients = self.values
        parameters = [view(value) for view in views]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            given = [[v(g) for v in views] for g in gradients]
            return trajectory(self.cls, self.defaults, parameters, given, self.skipped)

    def is_coupled(self, whole: Mapping[str, Tensor]) -> bool:
        """Return whether the parameter becomes something else before, behind or between others."""

        def other(tensor: Tensor) -> Tensor:
            return 3 * tensor + 1

        def same(tensor: Tensor) -> Tensor:
            return tensor

        beside = (self.run([same, other])[0], self.run([other, same, other])[1])
        return not all(_same(found, whole) for found in beside)

    def survives(self, whole: Mapping[str, Tensor], dim: int) -> bool:
        """Return whether pieces along the dim become what these pieces of the whole became; also in number of one row,
        and every second row."""
        rows = torch.arange(self.shape[dim])
        for kept in (rows[1:], rows[::2], rows[:1], rows[1::2])[: 4 if self.thorough else 2]:
            try:
                (piece,) = self.run([partial(torch.index_select, dim=dim, index=kept)])
            except Exception:  # noqa: BLE001 - it refuses the piece: then it needs the whole
                return False
            if not _same(piece, {path: _piece(value, self.shape, dim, kept) for path, value in whole.items()}):
                return False
        return True


def further_trials(cls: OptimizerClass, defaults: Mapping[str, Any], ndim: int) -> Iterator[UpdateTrial]:
    """Yield trials that go beyond the numbers in an optimizer's own code and its hyper-parameters: more steps, larger
    and smaller gradients, larger values, larger dims. None of torch's own classes."""
    numbers = own_numbers(cls, defaults)
    shape = SIZES[:ndim]
    if steps_beyond(numbers) > STEPS:
        yield UpdateTrial(cls, defaults, shape, steps_beyond(numbers))
    for far in steps_far_beyond(numbers):
        yield UpdateTrial(cls, defaults, shape, skipped=far)
    large = scales_beyond(numbers)[-_NUMBERS:]
    small = [n for n in numbers if _SMALLEST <= n <= 1][:_NUMBERS]
    if large or small:
        scales = (*(n / 8 / sqrt(prod(shape)) for n in small), *large)
        for size in (1.0, *large[-1:]):
            yield UpdateTrial(cls, defaults, shape, max(STEPS, 3 * len(scales)), scales, size)
    for beyond in _shapes_beyond(numbers, ndim):
        yield UpdateTrial(cls, defaults, beyond, _LARGE_STEPS)


def _shapes_beyond(numbers: Sequence[int | float], ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield shapes of which all dims exceed a number, or of large ones as many as memory allows; all sizes different,
    and halves of them whole."""
    whole = sorted({int(n) for n in numbers if n == n // 1 and min(SIZES) < n <= _LARGEST_SIZE - 2 * ndim})
    for number in whole[-_NUMBERS:] if ndim <= 2 else whole[-1:]:
        most = _LARGEST_TENSOR if ndim <= 2 else _LARGEST_OF_MORE
        sizes = [number + 2 - number % 2 + 2 * dim for dim in range(ndim)]
        for count in range(ndim, 0, -1):
            others = _OTHER_DIMS[: ndim - count]
            front, back = (*sizes[:count], *others), (*others, *sizes[:count])
            if max(prod(front), prod(back)) <= most:
                yield from dict.fromkeys((front, back))
                break


def _piece(value: Tensor, shape: tuple[int, ...], dim: int, kept: Tensor) -> Tensor:
    """Return the piece of a tensor of the state: a dim with the size of the parameter's is cut with it."""
    place = next((i for i, size in enumerate(value.shape) if size == shape[dim]), None)
    return value if place is None else value.index_select(place, kept)


def _same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[path].shape == value.shape
        and torch.allclose(found[path], value, rtol=TOLERANCE, atol=TOLERANCE * _unit(value), equal_nan=True)
        for path, value in wanted.items()
    )


def _unit(value: Tensor) -> float:
    """Return the largest finite magnitude, or 1 where that is larger: what cancels has rounding of this size."""
    finite = value.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return max(1.0, float(finite.max())) if finite.numel() else 1.0
