"""Find the factors that a function makes of its dims, from the views, splits and slices that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from verify.evidence.operator_trace import Observer
from verify.operators.suggest.probe_call import Question

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
