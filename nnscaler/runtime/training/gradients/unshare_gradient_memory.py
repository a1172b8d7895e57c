"""Gradients that lie in one memory, apart.

Of `p.view(2, 2) + q.view(2, 2)` autograd leaves two views of one tensor in `p.grad` and `q.grad`, and whatever then
changes the one in place, changes both: the next backward adds to them twice, and clipping scales them twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def separate_gradients(leaves: Iterable[Tensor]) -> None:
    """Give each of the leaves' gradients memory of its own."""
    found = {id(leaf): leaf for leaf in leaves if leaf.grad is not None and leaf.grad.layout == torch.strided}
    end = 0
    for leaf in sorted(found.values(), key=_start):
        assert leaf.grad is not None, "those that have one"
        start, bytes_of = _start(leaf), leaf.grad.nbytes
        if start < end and bytes_of:
            leaf.grad = leaf.grad.clone()
        end = max(end, start + bytes_of)


def _start(leaf: Tensor) -> int:
    assert leaf.grad is not None
    return leaf.grad.data_ptr()
