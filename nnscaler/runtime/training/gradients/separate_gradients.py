"""Gradients that lie in one memory, apart.

Of `p.view(2, 2) + q.view(2, 2)` autograd leaves two views of one tensor in `p.grad` and `q.grad`, and whatever then
changes the one in place, changes both: the next backward adds to them twice, and clipping scales them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

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


def holders(tensor: Tensor) -> int:
    """Return how many tensors have the memory of this one, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without the object that asks


@cache
def holders_within_hook() -> int:
    """Return how many tensors have the memory of a gradient that a hook of its leaf sees first, if nothing else has it:
    autograd has not let go of what it took over."""
    leaf, seen = torch.nn.Parameter(torch.ones(2)), list[int]()

    def count(made: Tensor) -> None:
        assert made.grad is not None
        seen.append(holders(made.grad))

    leaf.register_post_accumulate_grad_hook(count)
    with torch.enable_grad():
        (leaf * 2).sum().backward()
    return seen[0]
