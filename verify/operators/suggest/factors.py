"""Find the factors that a function makes of its dims, from the views, splits and slices that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verify.operators.suggest.probe_call import Question

Outers = Mapping[int, tuple[int, ...]]


def find_outers(question: Question) -> Outers:
    """Return, by size of a dim, what may stand before an identifier in it: 3 and 3 * h for a dim
    viewed as (3, h, d)."""
    watcher = _Watcher()
    with watcher:
        question.run(question.tensors, {})
    return {size: tuple(sorted(found)) for size, found in watcher.outers.items()}


class _Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outers: dict[int, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not args or not isinstance(args[0], Tensor):
            return result
        before = tuple(args[0].shape)
        name = func.overloadpacket.__name__
        if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
            self._note(_prefixes(before, tuple(result.shape)))
        elif name == "slice":
            self._note(_shares(before, [result]))
        elif name in ("split", "split_with_sizes", "chunk"):
            self._note(_shares(before, result))
        return result

    def _note(self, found: Iterator[tuple[int, int]]) -> None:
        for size, outer in found:
            self.outers.setdefault(size, set()).add(outer)


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
